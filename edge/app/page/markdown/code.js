/** Code blocks: language, copying, and colours that are computed in a worker. */

import DOMPurify from "dompurify";
import { html, useEffect, useLayoutEffect, useRef, useState } from "edgerun/preact";
import { strings } from "../strings.js";

/** Longest code that is coloured, in characters. */
const MAX_COLOURED = 50_000;
/** Time that loading a language and starting the worker may take, in milliseconds: much on a machine that is busy. */
const LOADING_PATIENCE = 60_000;
/** Time that colouring may take, in milliseconds. */
const PATIENCE = 5000;
/** Code that is being written is coloured again when it has grown by this factor. */
const GROWTH = 1.2;
/** Controls that change the direction in which text is shown, so that code reads otherwise than it runs. */
const DIRECTION = /[\u202A-\u202E\u2066-\u2069\u200E\u200F\u061C]/;

const NAMES =
  "bash c cpp csharp css diff dockerfile dos go haskell ini java javascript json kotlin latex lua makefile markdown nginx " +
  "perl php plaintext powershell python r ruby rust scala shell sql swift typescript vbnet xml yaml";
const LANGUAGES = new Map(NAMES.split(" ").map((name) => [name, name]));
const ALIASES = {
  bash: "sh zsh",
  c: "h",
  cpp: "c++ cc cxx hpp",
  csharp: "c# cs",
  diff: "patch",
  dockerfile: "docker",
  dos: "bat batch cmd",
  go: "golang",
  haskell: "hs",
  ini: "toml",
  javascript: "js jsx mjs cjs",
  json: "jsonc json5 jsonl",
  kotlin: "kt",
  latex: "tex",
  makefile: "make mk",
  markdown: "md",
  perl: "pl",
  plaintext: "text txt",
  powershell: "ps1 ps pwsh",
  python: "py python3 pycon",
  ruby: "rb",
  rust: "rs",
  shell: "console shellsession",
  typescript: "ts tsx",
  vbnet: "vb",
  xml: "html xhtml svg rss vue",
  yaml: "yml",
};
for (const [name, others] of Object.entries(ALIASES)) for (const other of others.split(" ")) LANGUAGES.set(other, name);
/** Languages that others contain. */
const INSIDE = { dockerfile: ["bash"], markdown: ["xml"], shell: ["bash"], xml: ["css", "javascript"] };

const waiting = [];
let worker = null;

/** Answers the first request that waits, and sends the next one. */
function answered(value) {
  const { resolve, timer } = waiting.shift();
  clearTimeout(timer);
  resolve(value);
  if (waiting.length) send();
}

function send() {
  const first = waiting[0];
  if (!worker) {
    worker = new Worker(new URL("./highlight_worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => (data === true ? limit(waiting[0], PATIENCE) : answered(data));
  }
  limit(first, LOADING_PATIENCE);
  worker.postMessage(first.request);
}

/** Gives up the first request after some milliseconds from now. */
function limit(first, patience) {
  clearTimeout(first.timer);
  first.timer = setTimeout(() => {
    worker.terminate();
    worker = null;
    answered(null);
  }, patience);
}

/** Colours code; the promise gives HTML, or null where it cannot be coloured or takes too long. */
function highlight(code, name) {
  return new Promise((resolve) => {
    waiting.push({ request: { code, name, inside: INSIDE[name] ?? [] }, resolve, timer: 0 });
    if (waiting.length === 1) send();
  });
}

function coloured(markup) {
  const fragment = DOMPurify.sanitize(markup, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true });
  return fragment.childNodes;
}

/** The code: in colours as far as these are known, and the rest as plain text. */
function Colours({ code, name, open }) {
  const element = useRef(null);
  const state = useRef({ busy: false, failed: false, mounted: true });
  const [done, setDone] = useState({ prefix: "", markup: "" });
  useEffect(() => {
    state.current.mounted = true;
    return () => (state.current.mounted = false);
  }, []);
  useEffect(() => {
    const now = state.current;
    if (!name || now.busy || now.failed || code.length > MAX_COLOURED || done.prefix === code) return;
    const prefix = open ? code.slice(0, code.lastIndexOf("\n") + 1) : code;
    if (!prefix || (open && prefix.length < done.prefix.length * GROWTH)) return;
    now.busy = true;
    highlight(prefix, name).then((markup) => {
      now.busy = false;
      now.failed = markup === null;
      if (now.mounted && markup !== null) setDone({ prefix, markup });
    });
  });
  const known = code.startsWith(done.prefix) ? done : { prefix: "", markup: "" };
  useLayoutEffect(() => element.current.replaceChildren(...coloured(known.markup)), [known.markup]);
  return html`<code><span ref=${element} />${code.slice(known.prefix.length)}</code>`;
}

function CopyButton({ code }) {
  const [copied, setCopied] = useState(false);
  useEffect(() => {
    if (!copied) return undefined;
    const timer = setTimeout(() => setCopied(false), 2000);
    return () => clearTimeout(timer);
  }, [copied]);
  const copy = () => navigator.clipboard.writeText(code).then(() => setCopied(true));
  return html`<button type="button" class="md-copy" onClick=${copy}>
    <span aria-live="polite">${copied ? strings.markdown.copied : strings.markdown.copy}</span>
  </button>`;
}

/**
 * A code block with the name of its language and a button that copies it.
 *
 * @param {{code: string, language: string, open?: boolean}} props open: the block is still being written
 */
export function CodeBlock({ code, language, open = false }) {
  const label = language.slice(0, 30);
  return html`<div class="md-code">
    <div class="md-code-head">
      <span>${label}</span>
      ${label.toLowerCase() === "mermaid" && html`<span class="md-note">${strings.markdown.mermaid}</span>`}
      ${DIRECTION.test(code) && html`<span class="md-warning">${strings.markdown.direction}</span>`}
      <${CopyButton} code=${code} />
    </div>
    <pre dir="ltr" tabindex="0" role="group" aria-label=${strings.markdown.code(label)}><${Colours}
      code=${code}
      name=${LANGUAGES.get(language.toLowerCase())}
      open=${open}
    /></pre>
  </div>`;
}
