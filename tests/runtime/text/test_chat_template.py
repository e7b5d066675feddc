from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun import TemplateError
from edgerun.models.bundle import Bundle
from edgerun.runtime.text.chat_template import ChatTemplate, load_template
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.shared_data import data_path

CONVERSATION = [
    {"role": "user", "content": "Grüße <b>&</b>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Again"},
]
FAMILIES = [
    "HuggingFaceTB-SmolLM3-3B",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_of_well_known_families_render(family: str) -> None:
    source = data_path(f"tokenizers/chat_templates/{family}.jinja").read_text(encoding="utf-8")
    text = ChatTemplate(source, SPECIAL).render(CONVERSATION)
    for message in CONVERSATION:
        assert message["content"] in text
    assert text.index("Hello") < text.index("Again")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_tojson_does_not_escape_text(value: object) -> None:
    text = ChatTemplate("{{ messages[0].content | tojson }}").render([{"role": "user", "content": value}])
    assert json.loads(text) == value
    assert text == json.dumps(value, ensure_ascii=False)


def test_generation_blocks_and_loop_controls_render() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    )
    assert ChatTemplate(source).render(CONVERSATION) == "Grüße <b>&</b>;Hello;"


def test_tojson_takes_the_options_of_json_dumps() -> None:
    source = "{{ m | tojson }}{{ m | tojson(indent=1) }}{{ m | tojson(separators=(',', ':'), ensure_ascii=True) }}"
    text = ChatTemplate(source + "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}").render([], m={"k": ["ü", 1]})
    assert text == '{"k": ["ü", 1]}{\n "k": [\n  "ü",\n  1\n ]\n}{"k":["\\u00fc",1]}{"a": 2, "b": 1}'


def test_tools_and_documents_are_none_by_default() -> None:
    template = ChatTemplate("{{ tools is none }} {{ documents is none }} {{ tools }} {{ documents }}")
    assert template.render([]) == "True True None None"
    assert template.render([], tools=[], documents=[]) == "False False [] []"
    assert template.render([], tools=({"a": 1},), documents=({"b": 2},)) == "False False [{'a': 1}] [{'b': 2}]"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "files"])
def test_the_tool_use_template_renders_conversations_with_tools(tmp_path: Path, tiny_bundle: Path, where: str) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    config = json.loads((bundle / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ messages[0].content }} with {{ tools[0].name }}"},
    ]
    (bundle / "chat_template.jinja").unlink(missing_ok=True)
    if where == "files":
        (bundle / "additional_chat_templates").mkdir()
        (bundle / "chat_template.jinja").write_text(config["chat_template"][0]["template"], encoding="utf-8")
        named = bundle / "additional_chat_templates" / "tool_use.jinja"
        named.write_text(config["chat_template"].pop()["template"], encoding="utf-8")
    (bundle / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    opened = Bundle(bundle, bundle / "model.onnx", None)
    template = load_template(opened, TextTokenizer(opened, 300))
    assert template is not None
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "hi"
    assert template.render(messages, tools=[{"name": "weather"}]) == "hi with weather"


@pytest.mark.parametrize("value", [3, {"default": "x"}, [{"name": "default", "template": 3}], [{"template": "x"}]])
def test_a_template_that_is_not_text_is_refused(tmp_path: Path, tiny_bundle: Path, value: object) -> None:
    shutil.copy(tiny_bundle / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}), encoding="utf-8")
    opened = Bundle(tmp_path, tmp_path / "model.onnx", None)
    with pytest.raises(TemplateError, match="chat_template in tokenizer_config.json is not text; repair the model's"):
        load_template(opened, TextTokenizer(opened, 300))


def test_small_products_are_allowed() -> None:
    assert ChatTemplate("{{ '-' * 3 }}{{ 2 ** 8 }}{{ 1.5 * 2 }}").render([]) == "---2563.0"


def test_blocks_are_trimmed() -> None:
    source = "{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source).render(CONVERSATION) == "x\nx\nx\n"


def test_a_template_can_refuse_messages() -> None:
    with pytest.raises(TemplateError, match="System role not supported; repair the model's chat template"):
        ChatTemplate("{{ raise_exception('System role not supported') }}").render([])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{% set _ = messages.append({'role': 'user'}) %}{{ messages | length }}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{% for a in range(100000000) %}x{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
        "{{ 'a' * 400000000 }}",
        "{{ [0] * 400000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ 1 / 0 }}",
        "{{ undefined.attribute }}",
    ],
)
def test_malicious_and_broken_templates_raise_a_one_line_error(attack: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(attack).render([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)
    assert "use --raw" in str(caught.value)


@pytest.mark.parametrize("probe", ["{{ strftime_now.__globals__ }}", "{{ '%s' | format(lipsum.__globals__) }}"])
def test_templates_cannot_reach_python_internals(probe: str) -> None:
    assert ChatTemplate(probe).render([]) == ""


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{{", "{% endif %}", "{% frobnicate %}"]
)
def test_invalid_jinja_is_refused_when_compiled(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template is not valid"):
        ChatTemplate(source)
