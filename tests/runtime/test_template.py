from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import data_path
from edgerun import TemplateError
from edgerun.runtime.text.template import ChatTemplate

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


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_render_as_transformers_renders_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs the oracle extra")
    path = data_path(f"tokenizers/chat_templates/{family}.jinja")
    source = path.read_text(encoding="utf-8")
    expected, _ = chat.render_jinja_template(
        [CONVERSATION], chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    assert ChatTemplate(source, SPECIAL).render(CONVERSATION) == expected[0]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_tojson_keeps_text_as_it_is(value: object) -> None:
    text = ChatTemplate("{{ messages[0].content | tojson }}").render([{"role": "user", "content": value}])
    assert json.loads(text) == value
    assert text == json.dumps(value, ensure_ascii=False)


def test_generation_marks_and_loop_controls_are_understood() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    )
    assert ChatTemplate(source).render(CONVERSATION) == "Grüße <b>&</b>;Hello;"


def test_small_products_are_allowed() -> None:
    assert ChatTemplate("{{ '-' * 3 }}{{ 2 ** 8 }}{{ 1.5 * 2 }}").render([]) == "---2563.0"


def test_blocks_are_trimmed() -> None:
    source = "{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source).render(CONVERSATION) == "x\nx\nx\n"


def test_a_template_may_refuse() -> None:
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
def test_malicious_or_broken_templates_end_in_one_clear_line(attack: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(attack).render([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)
    assert "use --raw" in str(caught.value)


@pytest.mark.parametrize("probe", ["{{ strftime_now.__globals__ }}", "{{ '%s' | format(lipsum.__globals__) }}"])
def test_python_internals_are_not_there(probe: str) -> None:
    assert ChatTemplate(probe).render([]) == ""


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{{", "{% endif %}", "{% frobnicate %}"]
)
def test_what_is_not_jinja_is_refused_when_compiled(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template is not valid"):
        ChatTemplate(source)
