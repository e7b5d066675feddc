/** An answer token by token: how probable each was, what else could have come, and how it came to be. */

import { getTokens } from "../api.js";
import { html, useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "edgerun/preact";

import { memo } from "../store.js";
import { strings } from "../strings.js";
import { levelOf, splitIntoPieces, summaryOf } from "../token_pieces.js";
import { TokenDetails, originOf, visible } from "./token_details.js";

const MODES = ["probability", "origin"];
const MODE_KEY = "edge-run.token-colours";
const SHOW_AFTER = 200; // milliseconds under the pointer
const HIDE_AFTER = 250; // milliseconds to get from a token into its details
/** Kinds of tokens that the model has chosen by itself. */
const OWN = ["prefill", "decoded", "bonus"];
const LAST_PASS = 6; // later ones over a block have its colour

function readMode() {
  try {
    const mode = localStorage.getItem(MODE_KEY);
    return MODES.includes(mode) ? mode : MODES[0];
  } catch {
    return MODES[0];
  }
}

function keepMode(mode) {
  try {
    localStorage.setItem(MODE_KEY, mode);
  } catch {
    // The choice lasts as long as the view.
  }
}

function classOf(piece) {
  const { kind, drafter, block_pass: pass } = piece.tokens[0];
  const own = OWN.includes(kind) ? "own" : kind === "filled" ? `filled-${Math.min(pass, LAST_PASS)}` : kind;
  return `token level-${levelOf(piece.probability)} is-${own}${kind === "accepted" ? ` by-${drafter}` : ""}${piece.special ? " special" : ""}`;
}

/** The text of a piece; line breaks, tabs and blanks are marked by style, so that copied text has no marks. */
function marked(text) {
  if (!/[\n\t]|^ +$| {2}/.test(text)) return text;
  return text.split(/(\n|\t|^ +$| {2,})/).map((part) => {
    if (part === "\n") return html`<i class="mark-line"></i>${"\n"}`;
    if (part === "\t") return html`<i class="mark-tab"></i>${"\t"}`;
    if (/^ +$/.test(part) && (part.length > 1 || text.trim() === "")) {
      return html`<i class="mark-space" data-marks=${"·".repeat(part.length)}>${part}</i>`;
    }
    return part;
  });
}

const Pieces = memo(function Pieces({ pieces }) {
  return pieces.map(
    (piece, at) =>
      html`<span
        key=${piece.index}
        class=${classOf(piece)}
        role="option"
        aria-selected="false"
        aria-label=${piece.text.trim() ? undefined : visible(piece.text)}
        data-piece=${at}
        >${marked(piece.text)}</span>`,
  );
});

function labelOf(piece) {
  const text = piece.special ? strings.tokens.specialToken(piece.text) : visible(piece.text);
  return strings.tokens.label(text, strings.tokens.percent(piece.probability), originOf(piece));
}

/** The piece in the line above or below whose place is nearest. */
function inNextLine(element, direction) {
  const from = element.getBoundingClientRect();
  const middle = (from.left + from.right) / 2;
  const distance = (rect) => Math.max(rect.left - middle, middle - rect.right, 0);
  let best = null;
  let line = null;
  const step = direction > 0 ? "nextElementSibling" : "previousElementSibling";
  for (let other = element[step]; other; other = other[step]) {
    if (other.dataset.piece === undefined) continue;
    const rect = other.getBoundingClientRect();
    const beyond = direction > 0 ? rect.top >= from.bottom - 2 : rect.bottom <= from.top + 2;
    if (!beyond) continue;
    if (line !== null && Math.abs(rect.top - line) > from.height / 2) break;
    line ??= rect.top;
    if (best === null || distance(rect) < distance(best.getBoundingClientRect())) best = other;
  }
  return best;
}

/** Keeps which piece is active: it has a border and a description for screen readers, and the keys start from it. */
function useActivePiece(list, pieces, id) {
  const active = useRef(null);
  const activate = useCallback(
    (element) => {
      if (active.current && active.current !== element) {
        active.current.removeAttribute("id");
        active.current.removeAttribute("data-active");
        active.current.setAttribute("aria-selected", "false");
      }
      active.current = element;
      element.id = id;
      element.dataset.active = "";
      element.setAttribute("aria-selected", "true");
      // Describing every token beforehand would take longer than showing them.
      element.setAttribute("aria-label", labelOf(pieces[Number(element.dataset.piece)]));
      list.current.setAttribute("aria-activedescendant", id);
    },
    [pieces],
  );
  return { active, activate };
}

function Legend({ mode, summary }) {
  const { drafters, kinds, filled } = summary;
  if (mode === "probability") {
    return html`<ul class="token-legend" aria-label=${strings.tokens.legend}>
      ${strings.tokens.levels.map((name, level) => html`<li key=${level}><i class=${`swatch level-${level}`}></i>${name}</li>`)}
    </ul>`;
  }
  const own = OWN.reduce((sum, kind) => sum + (kinds.get(kind) ?? 0), 0);
  const entries = [
    ...[...drafters].map(([drafter, count]) => [`is-accepted by-${drafter}`, strings.tokens.acceptedFrom(strings.tokens.drafters[drafter] ?? drafter), count]),
    ["is-corrected", strings.tokens.corrected, kinds.get("corrected") ?? 0],
    ["is-own", strings.tokens.own, own],
    ...[...filled].map(([pass, count]) => [`is-filled-${Math.min(pass, LAST_PASS)}`, strings.tokens.inPass(pass), count]),
    ["is-chosen", strings.tokens.chosen, kinds.get("chosen") ?? 0],
  ].filter(([, , count]) => count);
  return html`<ul class="token-legend" aria-label=${strings.tokens.legend}>
    ${entries.map(([name, text, count]) => html`<li key=${name}><i class=${`swatch ${name}`}></i>${text} <span class="quiet">${count}</span></li>`)}
  </ul>`;
}

function ModeSwitch({ mode, onChange }) {
  const group = useId();
  return html`<fieldset class="token-modes">
    <legend>${strings.tokens.colourBy}</legend>
    ${MODES.map(
      (name) =>
        html`<label key=${name}
          ><input type="radio" name=${group} checked=${mode === name} onChange=${() => onChange(name)} /><span
            >${strings.tokens.modes[name]}</span
          ></label
        >`,
    )}
  </fieldset>`;
}

function Tokens({ content, tokens, onBranch, seen }) {
  const { before, pieces, after } = useMemo(() => splitIntoPieces(content, tokens), [content, tokens]);
  const summary = useMemo(() => summaryOf(tokens), [tokens]);
  const [mode, setMode] = useState(readMode);
  /** What is open: {at, anchor, pinned, focus}. */
  const [open, setOpen] = useState(null);
  const list = useRef(null);
  const timer = useRef(0);
  const id = useId();
  const { active, activate } = useActivePiece(list, pieces, id);
  useEffect(() => () => clearTimeout(timer.current), []);
  useLayoutEffect(() => {
    const focused = document.activeElement;
    const near = focused === document.body || list.current.closest("[data-message]")?.contains(focused);
    if (near && !seen.current) list.current.focus({ preventScroll: true });
    seen.current = true;
  }, []);

  const close = useCallback((refocus) => {
    clearTimeout(timer.current);
    setOpen(null);
    if (refocus) list.current?.focus({ preventScroll: true });
  }, []);
  const later = (delay, change) => {
    clearTimeout(timer.current);
    timer.current = setTimeout(change, delay);
  };
  const show = (anchor, pinned, focus = false) => {
    clearTimeout(timer.current);
    setOpen({ at: Number(anchor.dataset.piece), anchor, pinned, focus });
  };
  const pieceAt = (event) => event.target.closest("[data-piece]");
  const hover = (event) => {
    const anchor = pieceAt(event);
    if (event.pointerType === "touch" || open?.pinned) return;
    if (anchor) later(open ? 0 : SHOW_AFTER, () => show(anchor, false));
    else later(HIDE_AFTER, () => setOpen(null));
  };
  const leave = () => !open?.pinned && later(HIDE_AFTER, () => setOpen(null));
  const hoverDetails = (inside) => (inside ? clearTimeout(timer.current) : leave());
  const press = (event) => {
    const anchor = pieceAt(event);
    if (!anchor || String(getSelection())) return;
    activate(anchor);
    if (open?.pinned && open.anchor === anchor) close(false);
    else show(anchor, true);
  };
  const go = (element) => {
    if (!element) return;
    activate(element);
    element.scrollIntoView({ block: "nearest" });
    show(element, true);
  };
  const key = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const all = list.current.querySelectorAll("[data-piece]");
    const current = active.current?.isConnected ? active.current : null;
    const at = current ? Number(current.dataset.piece) : -1;
    const moves = {
      ArrowRight: () => go(all[Math.min(at + 1, all.length - 1)]),
      ArrowLeft: () => go(all[Math.max(at - 1, 0)]),
      ArrowDown: () => go(current ? inNextLine(current, 1) : all[0]),
      ArrowUp: () => current && go(inNextLine(current, -1)),
      Home: () => go(all[0]),
      End: () => go(all[all.length - 1]),
      Enter: () => (current ? show(current, true, true) : go(all[0])),
      " ": () => (current ? show(current, true, true) : go(all[0])),
      Escape: () => close(true),
    };
    if (!moves[event.key] || (event.key === "Escape" && !open)) return;
    event.preventDefault();
    event.stopPropagation();
    moves[event.key]();
  };
  const change = (next) => {
    setMode(next);
    keepMode(next);
  };
  const choose = (alternative) => {
    const { index } = pieces[open.at];
    close(true);
    onBranch(index, alternative);
  };
  return html`<section class="tokens" data-mode=${mode} aria-label=${strings.tokens.title}>
    <p class="token-summary" title=${strings.common.tokensAbout}>${strings.tokens.summary(summary)}</p>
    <div class="token-controls">
      <${ModeSwitch} mode=${mode} onChange=${change} />
      <${Legend} mode=${mode} summary=${summary} />
    </div>
    ${before && html`<div class="token-unknown" title=${strings.tokens.unknown}>${before}</div>`}
    <div
      ref=${list}
      class="token-text"
      dir="auto"
      role="listbox"
      tabindex="0"
      aria-label=${strings.tokens.list}
      onPointerOver=${hover}
      onPointerLeave=${leave}
      onClick=${press}
      onKeyDown=${key}
    ><${Pieces} pieces=${pieces} /></div>
    ${after && html`<div class="token-unknown" title=${strings.tokens.unknown}>${after}</div>`}
    <p class="quiet token-keys">${strings.tokens.keys}</p>
    ${open &&
    html`<${TokenDetails}
      piece=${pieces[open.at]}
      anchor=${open.anchor}
      pinned=${open.pinned}
      focus=${open.focus}
      onChoose=${onBranch ? choose : null}
      onClose=${close}
      onHover=${hoverDetails}
    />`}
  </section>`;
}

/**
 * An answer token by token.
 *
 * @param {object} props
 * @param {{id: string, content: string, state: string}} props.message an answer that is not being written
 * @param {((index: number, alternative: number) => void)|null} props.onBranch called with a token's place and the id of
 *   the token that is to be there instead
 */
export function TokenView({ message, onBranch = null }) {
  const [loaded, setLoaded] = useState(null);
  const [failure, setFailure] = useState("");
  /** Whether the tokens have been shown: they take the focus when they are opened, and not when they are read again. */
  const seen = useRef(false);
  useEffect(() => {
    let wanted = true;
    setLoaded(null);
    setFailure("");
    getTokens(message.id).then(
      ({ tokens }) => wanted && setLoaded({ tokens, content: message.content }),
      (error) => wanted && setFailure(error.message),
    );
    return () => {
      wanted = false;
    };
  }, [message.id, message.state, message.content]);
  if (failure) return html`<p class="quiet" role="alert">${failure}</p>`;
  if (!loaded) return html`<p class="quiet" role="status">${strings.chat.loading}</p>`;
  if (!loaded.tokens.length) return html`<p class="quiet">${strings.tokens.none}</p>`;
  return html`<${Tokens} content=${loaded.content} tokens=${loaded.tokens} onBranch=${onBranch} seen=${seen} />`;
}
