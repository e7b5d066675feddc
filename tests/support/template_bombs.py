"""Random chat templates that try to take much time or memory, from a seed, and a process that renders them."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence

from edgerun import TemplateError
from edgerun.runtime.text.chat_template import ChatTemplate

_START = [
    "'ab'",
    "[1, 2]",
    "[['a', 'b'], {'k': [1]}]",
    "{'k': 'v', 'l': [1, 2]}",
    "7",
    "messages",
    "(1, 'x')",
    "'\\u4e2d<&\\n'",
]
_NUMBERS = ["0", "1", "2", "3", "10", "60", "300", "1000", "99999", "3000000000", "2.5", "-1", "1e308", "4294967296"]
_GROWTH = [
    "{x} + {x}",
    "{x} ~ {x}",
    "({x} ~ '') + ({x} ~ '')",
    "[{x}, {x}]",
    "[{x}] + [{x}]",
    "({x}, {x})",
    "{{'a': {x}, 'b': {x}}}",
    "{x} * {n}",
    "{n} * {x}",
    "{n} ** {n}",
    "'%{n}d' % {n}",
    "('%' ~ {n} ~ 'd') % 1",
    "'%*d' % ({n}, 1)",
    "'%s%s' % ({x}, {x})",
    "'%(a)s%(a)s' % {{'a': {x}}}",
    "'{{:>{{}}}}'.format({x}, {n})",
    "('{{:' ~ {n} ~ '}}').format(1)",
    "'{{0}}{{0}}'.format({x})",
    "({x} ~ '').replace('', {x} ~ '')",
    "({x} ~ '').replace('a', 'aa')",
    "({x} ~ '').join({x})",
    "({x} ~ '').center({n})",
    "({x} ~ '').zfill({n})",
    "({x} ~ '').split('')",
    "({x} ~ '').split('a')",
    "({x} ~ '').splitlines()",
    "({x} ~ '').strip({x} ~ '')",
    "({x} ~ '').rfind('b' ~ {x})",
    "({x} ~ '').upper()",
    "{x}[::-1]",
    "{x}[{n}:]",
    "dict(a={x}, b={x})",
    "dict([['a', {x}], ['b', {x}]])",
    "range({n})",
    "range({n}) | list",
    "namespace(a={x})",
    "namespace(a=ns, b={x})",
    "{{{x}: {x}}}",
    "{x}.items() | list",
    "{x}.get('k', {x})",
    "f({x})",
    "g({x}, {x})",
    "strftime_now('%{n}Y')",
    "strftime_now({x} ~ '%Y')",
    "({x} == {x}) ~ {x}",
    "({x} in {x}) ~ {x}",
    "({x} < {x}) ~ {x}",
    "{x} if {x} == [{x}] else [{x}]",
    "[{x}] | groupby(0)",
    "cycler({x})",
    "joiner({x})",
    "lipsum(n={n})",
    "{x} // {n}",
    "{x} - {n}",
    "-{x}",
    "{x}.a.b",
    "loop.changed({x})",
    "loop.cycle({x}, {x})",
]
_FILTERS = [
    "string", "list", "tojson", "tojson(indent={n})", "tojson(indent='{n}', sort_keys=true)",
    "tojson(ensure_ascii=true)",
    "join({x})", "join(',')", "join({n})", "replace('', {x})", "replace('a', {x})", "indent({n})", "indent({x} ~ '')",
    "indent({n}, true, true)", "center({n})", "format({x}, {x})", "format({n})", "batch({n})", "batch({n}, {x})",
    "slice({n})", "wordwrap({n})", "truncate({n})", "map('string')", "map('tojson')", "map('list')", "map('upper')",
    "map('join', {x})", "map('#steps', 1, 1)", "map(attribute='a.b.c')", "select", "select('in', {x})",
    "select('eq', {x})",
    "selectattr('role', 'equalto', {x})", "reject('defined')", "rejectattr('a')", "sort", "sort(attribute='0,1,k')",
    "unique", "unique | list", "sum", "sum(start={x})", "reverse", "reverse | list", "first", "last", "length", "min",
    "max", "int", "int(base=36)", "float", "round({n})", "abs", "upper", "title", "capitalize", "lower", "e", "safe",
    "trim", "trim({x} ~ '')", "items | list", "dictsort", "default({x})", "groupby('k')", "pprint", "xmlattr", "urlize",
    "urlencode", "filesizeformat", "attr('k')", "wordcount", "striptags", "random",
]  # fmt: skip
_TESTS = ["defined", "string", "iterable", "eq({x})", "in {x}", "sameas({x})", "divisibleby({n})", "lower", "mapping"]
_HEADER = (
    "{% macro f(a) %}{{ a }}{{ a }}{% endmacro %}"
    "{% macro g(a, b=1) %}{% for c in a %}{{ b }}{{ caller() if caller }}{% endfor %}"
    "{{ varargs }}{{ kwargs }}{% endmacro %}"
    "{% macro h(a, n=0) %}{{ a }}{% if n < 30 %}{{ h(a, n + 1) }}{{ h(a, n + 1) }}{% endif %}{% endmacro %}"
)
_MUTATIONS = [*" +~|[]()'*:", "{%", "%}", "{{", "}}", "9" * 5000, "1e999", "not", "ns"]

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <|end|> & welcome"},
    {"role": "assistant", "content": "<think>Hm.</think>Hi"},
    {"role": "user", "content": "Again\nand again"},
]


def random_template(seed: int, real: Sequence[str]) -> str:
    """Make a template: one in four is a damaged real one, the others combine operations that grow values."""
    rng = random.Random(seed)
    if real and rng.random() < 0.25:
        return _damaged(rng, rng.choice(real))
    statements = "".join(_statement(rng, rng.choice((1, 2, 3))) for _ in range(rng.choice((1, 2, 3))))
    start = rng.choice(_START)
    prelude = f"{_HEADER}{{% set ns = namespace(x={start}, y={rng.choice(_START)}) %}}{{% set z = {start} %}}"
    return f"{prelude}{statements}{{{{ {_expression(rng, 1)} }}}}"


def _number(rng: random.Random) -> str:
    return rng.choice(_NUMBERS)


def _expression(rng: random.Random, depth: int) -> str:
    value = rng.choice(("ns.x", "ns.x", "ns.x", "ns.y", "z", "messages[0].content", rng.choice(_START)))
    for _ in range(rng.choice((0, 1, 1, 2)) if depth else 0):
        inner = value if rng.random() < 0.7 else _expression(rng, depth - 1)
        if rng.random() < 0.5:
            value = "(" + rng.choice(_GROWTH).format(x=inner, n=_number(rng)) + ")"
        else:
            value = f"({value} | {rng.choice(_FILTERS)})".replace("{x}", inner).replace("{n}", _number(rng))
    return value


def _statement(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return f"{{% set ns.{rng.choice('xy')} = {_expression(rng, 2)} %}}"
    body = "".join(_statement(rng, depth - 1) for _ in range(rng.choice((1, 1, 2))))
    value = _expression(rng, 1)
    if kind < 0.7:
        count = rng.choice(("3", "30", "60", "400", "5000", "99999"))
        source = rng.choice((f"range({count})", f"range({count})", f"range({count})", value))
        condition = rng.choice(("", "", "", " if false", " if loop", f" if {value}"))
        tail = rng.choice(("", "", "{{ loop.length }}", "{{ loop.last }}", "{{ ns.x }}", "{% else %}x"))
        return f"{{% for i in {source}{condition} %}}{body}{tail}{{% endfor %}}"
    if kind < 0.76:
        return f"{{% for i in {value} recursive %}}{body}{{{{ loop({value}) }}}}{{{{ loop(i) }}}}{{% endfor %}}"
    if kind < 0.82:
        return f"{{% set ns.x %}}{{{{ {value} }}}}{body}{{{{ {value} }}}}{{% endset %}}"
    if kind < 0.86:
        chosen = rng.choice(("upper", "indent(99)", "e", "replace(1, 2)"))
        return f"{{% filter {chosen} %}}{{{{ {value} }}}}{body}{{% endfilter %}}"
    if kind < 0.9:
        return f"{{% call g({value}) %}}{{{{ {value} }}}}{{% endcall %}}{body}"
    if kind < 0.94:
        test = rng.choice(_TESTS).replace("{x}", value).replace("{n}", _number(rng))
        return f"{{% if {value} is {test} %}}{body}{{% else %}}{{{{ h({value}) }}}}{{% endif %}}"
    if kind < 0.97:
        macro = f"{{% macro k{depth}(a={value}) %}}{body}{{{{ a }}}}{{{{ k{depth}(a) }}}}{{% endmacro %}}"
        return f"{macro}{{{{ k{depth}() }}}}"
    return f"{{{{ h({value}) }}}}{body}"


def _damaged(rng: random.Random, source: str) -> str:
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(source))
        end = min(len(source), start + rng.choice((0, 1, 3, 20, 200)))
        kind = rng.random()
        if kind < 0.4:
            piece = rng.choice(_MUTATIONS)
        elif kind < 0.6:
            piece = source[start:end] * rng.choice((2, 3, 50))
        elif kind < 0.7:
            piece = f"{{{{ {_expression(rng, 2)} }}}}"
        else:
            piece = ""
        source = source[:start] + piece + source[end:]
    return source


def render_lines() -> None:
    """Render each line, a template as JSON; answer by a problem or null, seconds of the processor and peak memory."""
    import resource

    for line in sys.stdin:
        started = time.process_time()
        problem = None
        try:
            ChatTemplate(json.loads(line)).render(MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
        except TemplateError as error:
            if "\n" in str(error) or len(str(error)) > 500:
                problem = f"not one short line: {error!s:.1000}"
        except BaseException as error:  # noqa: BLE001  any other exception is what the test looks for
            problem = f"{type(error).__name__}: {error!s:.1000}"
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = usage if sys.platform == "darwin" else usage * 1024
        print(json.dumps([problem, time.process_time() - started, peak]), flush=True)
