from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun import TemplateError
from edgerun.models.bundle import Bundle
from edgerun.runtime.text.chat_template import ChatTemplate, load_template
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.nightly import examples, some_nightly
from support.processes import started
from support.shared_data import data_path
from support.template_bombs import random_template

CONVERSATION = [
    {"role": "user", "content": "Grüße <b>&</b>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Again"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def grown(start: str, step: str, times: int = 60) -> str:
    """A template that replaces `x` again and again by what `step` makes of it, and prints it."""
    grow = f"{{% for i in range({times}) %}}{{% set ns.x = {step.replace('x', 'ns.x')} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={start}) %}}{grow}{{{{ ns.x }}}}"


LONG = "('ab' * 1000000)"
ENDLESS = "range(99999)"
BOMBS = [
    # Doubling.
    grown("'ab'", "x + x"),
    grown("'ab'", "x ~ x"),
    grown("'ab'", "[x, x] | join"),
    grown("'ab'", "x.join([x, x, x])"),
    grown("'ab'", "x.replace('a', x)"),
    grown("'ab'", "x.replace('', x)"),
    grown("'ab'", "x | replace('b', x)"),
    grown("'ab'", "'%s%s' % (x, x)"),
    grown("'ab'", "'%s%s' | format(x, x)"),
    grown("'ab'", "'%(a)s%(a)s' % {'a': x}"),
    grown("'ab'", "'{0}{0}'.format(x)"),
    grown("['a']", "x + x"),
    grown("['a']", "x * 9"),
    grown("['a']", "[x, x] | sum(start=[])"),
    grown("2", "x * x"),
    grown("2", "x ** 2"),
    "{% macro f(a, n) %}{{ f(a ~ a, n - 1) if n else a }}{% endmacro %}{{ f('ab', 40) }}",
    "{% for i in [[1]] recursive %}{{ loop([i]) }}{% endfor %}",
    # Small structures that are large when they are printed, compared or written as JSON.
    grown("'ab'", "[x, x]"),
    grown("'ab'", "(x, x)"),
    grown("'ab'", "{'a': x, 'b': x}"),
    grown("'ab'", "dict(a=x, b=x)"),
    grown("'ab'", "[x, x] | list"),
    grown("'ab'", "[x, x] | map('list') | list"),
    grown("'ab'", "namespace(a=[x, x])") + "{{ [ns.x, ns.x] | tojson }}",
    grown("'ab'", "[x]", 3000),
    # One step that is large.
    *("{{ 'a' | center(3000000000) }}", "{{ 'a'.center(3000000000) }}", "{{ 'a'.ljust(3000000000) }}"),
    *("{{ '7'.zfill(3000000000) }}", "{{ 'a\tb'.expandtabs(3000000000) }}", "{{ 'a' | indent(3000000000, true) }}"),
    *("{{ '%3000000000d' | format(1) }}", "{{ '%3000000000d' % 1 }}", "{{ '%*d' % (3000000000, 1) }}"),
    *("{{ '%.3000000000f' % 1 }}", "{{ '{:3000000000}'.format(1) }}", "{{ '{:>{}}'.format(1, 3000000000) }}"),
    *("{{ [1] | tojson(indent=3000000000) }}", "{{ [1] | batch(3000000000, 'x') }}", "{{ [1] | slice(3000000000) }}"),
    *("{{ 1 | round(3000000000) }}", "{{ 5 | round(-3000000000) }}", "{{ range(3000000000) }}"),
    "{{ lipsum(n=99999) }}",
    *("{{ 'a b' | wordwrap(1, wrapstring='x' * 8000000) }}", "{{ [1] | join(3000000000 * 'a') }}"),
    "{{ messages | tojson(separators=('a' * 8000000, 'b')) }}",
    # Many pieces, many times.
    "{% for i in range(200) %}{% set x = ('a,' * 20000).split(',') %}{% endfor %}",
    # What ended in other errors.
    *("{{ cycler() }}", "{{ cycler().next() }}", "{{ joiner() }}", "{{ 1e999 }}", "{{ -1e999 }}"),
    *("{{ 1e308 * 10 | int }}", "{{ (1e308 * 10) | int }}", "{{ " + "9" * 5000 + " }}", "{{ (-8) ** 0.5 }}"),
    *("{{ {[1]: 2} }}", "{{ {(1, (2, 3)): 2} }}", "{{ messages | map('#steps', 1, 1) | list }}"),
    *("{{ ('f' * 5000) | int(base=16) }}", "{{ strftime_now('%3000000000Y') }}"),
    *("{{ raise_exception('a\nb' * 1000000) }}", "{{ '\ud800'.encode('utf-8') }}"),
    "{% autoescape true %}{% endautoescape %}",
    *("{% block a %}{{ self.a() }}{% endblock %}", "{% extends 'x' %}", "{{ dict.fromkeys(range(9)) }}"),
    # Compilation.
    *("{{ 'a' * 10 ** 9 }}", "{{ " + "[" * 150 + "]" * 150 + " }}", "x" * 300_000, "{{ a.b }}" * 5_500),
    *("{{ " + "a + " * 11_000 + "a }}", "{% if a %}" * 500 + "{% endif %}" * 500, "{{ " + "-" * 5000 + "1 }}"),
]
"""Templates that would take gigabytes, hours, or end in an error of Python."""
ENDLESS_TEMPLATES = [
    f"{{% for a in {ENDLESS} %}}{{% for b in {ENDLESS} %}}{{% endfor %}}{{% endfor %}}",
    f"{{% for a in {ENDLESS} %}}{{% for b in {ENDLESS} if false %}}{{% endfor %}}{{% endfor %}}",
    f"{{% for a in {ENDLESS} %}}{{% for b in {ENDLESS} %}}{{% if loop.length %}}{{% break %}}"
    "{% endif %}{% endfor %}{% endfor %}",
    f"{{% set x = {LONG} %}}{{% for a in {ENDLESS} %}}{{% if 'c' in x %}}{{% endif %}}{{% endfor %}}",
    f"{{% set x = {LONG} %}}{{% for a in {ENDLESS} %}}{{% if x == x ~ '' %}}{{% endif %}}{{% endfor %}}",
    f"{{% set x = {LONG} %}}{{{{ x.rfind('b' ~ x[:1000000]) }}}}",
    f"{{% set x = {LONG} %}}{{{{ x.strip('cd' * 1000000 ~ 'ab') }}}}",
    f"{{% set x = {LONG} %}}{{{{ x | list | length }}}}{{{{ x | list | length }}}}{{{{ x.split('a') | length }}}}",
    "{% for a in range(99999) %}{{ messages | tojson | length }}" + "{% set b = a %}" * 2000 + "{% endfor %}",
    f"{{{{ {ENDLESS} | map('string') | map('list') | sort | sum(start=[]) | unique | list }}}}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
]
"""Templates that take a second or more until their budget is spent."""


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
@settings(max_examples=examples(40))
def test_tojson_does_not_escape_text(value: object) -> None:
    text = ChatTemplate("{{ messages[0].content | tojson }}").render([{"role": "user", "content": value}])
    assert json.loads(text) == value
    assert text == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
            "{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
            "Grüße <b>&</b>;Hello;",
        ),
        ("{{ m | tojson }}{{ m | tojson(indent=1) }}", '{"k": ["ü", 1]}{\n "k": [\n  "ü",\n  1\n ]\n}'),
        ("{{ m | tojson(separators=(',', ':'), ensure_ascii=True) }}", '{"k":["\\u00fc",1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        # Templates of Hermes models look up the type of every value, also of one without a type.
        *(
            (f"{{% set a = {{'x': 1}} %}}{{{{ a[{key}] is defined }}}} {{{{ a[{key}] }}}}.", "False .")
            for key in ("a.nothing", "[1]", "{}", "(1, [2])")
        ),
        ("{% set a = {'x': 1} %}{{ a.y in a }} {{ a.get(a.y, 'none') }} {{ a.get('x') }}", "False none 1"),
        ("{{ '-' * 3 }}{{ 2 ** 8 }}{{ 1.5 * 2 }}", "---2563.0"),
        ("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n", "x\nx\nx\n"),
        # Nothing of Python's internals is reached.
        ("{{ strftime_now.__globals__ }}{{ '%s' | format(range.__globals__) }}", ""),
    ],
)
def test_templates_render(source: str, text: str) -> None:
    assert ChatTemplate(source).render(CONVERSATION, m={"k": ["ü", 1]}) == text


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
        *BOMBS,
    ],
)
def test_malicious_and_broken_templates_raise_a_one_line_error(attack: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(attack).render([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)
    assert "use --raw" in str(caught.value)


@pytest.mark.parametrize("source", some_nightly(ENDLESS_TEMPLATES, every=len(ENDLESS_TEMPLATES)))
def test_endless_templates_raise_a_one_line_error(source: str) -> None:
    with pytest.raises(TemplateError, match="failed: it (computes for too long|takes too much memory)"):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{{", "{% endif %}", "{% frobnicate %}"]
)
def test_invalid_jinja_is_refused_when_compiled(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template is not valid"):
        ChatTemplate(source)


def test_what_is_not_allowed_is_named() -> None:
    for source, name in (
        ("{{ 'a' | wordwrap(3) }}", "the filter 'wordwrap' is not allowed"),
        ("{{ 'a' is escaped }}", "the test 'escaped' is not allowed"),
        ("{{ 'a'.zfill(3) }}", "the method str.zfill is not allowed"),
        ("{% block a %}{% endblock %}", "block is not allowed"),
        ("{{ cycler('a') }}", "'cycler' is undefined"),
        ("{{ raise_exception('System role not supported') }}", "System role not supported; repair the model's chat"),
    ):
        with pytest.raises(TemplateError, match=name):
            ChatTemplate(source).render([])


def test_the_budget_grows_with_the_messages() -> None:
    """A long conversation has room for what a template does with each of its messages."""
    source = (
        "{% set ns = namespace(text='', list=[]) %}{% for m in messages %}{% set ns.text = ns.text ~ m.content %}"
        "{% set ns.list = ns.list + [m] %}{% if m in messages and m == ns.list[-1] %}{{ m.content | trim }}{% endif %}"
        "{% endfor %}{{ ns.text | length }} {{ ns.list | length }} {{ messages | tojson | length > 5 }}"
    )
    messages = [{"role": "user", "content": f"{number} " + "word " * 200} for number in range(200)]
    text = ChatTemplate(source).render(messages)
    written = sum(len(message["content"]) for message in messages)
    assert text.endswith(f"{written} 200 True")


def test_a_document_of_millions_of_characters_renders() -> None:
    content = "é word " * 500_000
    template = ChatTemplate("{{ messages[0].content | trim | replace('x', '') }}{{ tools | tojson | length }}")
    text = template.render([{"role": "user", "content": content}], tools=[{"a": 1}])
    assert len(text) == len(content) - 1 + 2
    assert text.endswith("é word10")


RENDER = "from support.template_bombs import render_lines; render_lines()"
CASES = 50
LONGEST_S = 20
LARGEST_BYTES = 2_000_000_000


@pytest.mark.parametrize("batch", some_nightly(range(12), every=12))
def test_random_templates_end_in_time_within_memory_and_in_one_line(batch: int) -> None:
    """In a process that is watched from outside: nightly 550 templates, and every day the first five."""
    pytest.importorskip("resource", reason="reads the memory of a process")
    folder = data_path("tokenizers/chat_templates")
    real = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))]
    cases = CASES if batch else 5
    with started([sys.executable, "-c", RENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        stdout = child.stdout
        threading.Thread(target=lambda: [lines.put(line) for line in stdout], daemon=True).start()
        for seed in range(batch * CASES, batch * CASES + cases):
            child.stdin.write(json.dumps(random_template(seed, real)).encode() + b"\n")
            child.stdin.flush()
            problem, seconds, peak = json.loads(lines.get(timeout=10 * LONGEST_S))
            assert problem is None, (seed, problem)
            assert seconds < LONGEST_S, seed
            assert peak < LARGEST_BYTES, seed
