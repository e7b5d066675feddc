/** What is known about one token: its probability, how it came to be, and its alternatives. */

import { createPortal, html, useLayoutEffect, useRef } from "edgerun/preact";

import { strings } from "../strings.js";
import { probabilityOf } from "../token_pieces.js";
import { IconButton } from "./dialogs.js";

const GAP = 6; // pixels between a token and its details
const MARGIN = 8; // pixels to the edge of the window

/** A text in which spaces at its ends and line breaks can be seen. */
export function visible(text) {
  return text
    .replace(/^ +| +$|  +/g, (spaces) => "·".repeat(spaces.length))
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥");
}

/** How the tokens of a piece came to be, in a sentence. */
export function originOf(piece) {
  const { kind, drafter, rejected, block_pass: pass } = piece.tokens[0];
  const name = strings.tokens.drafters[drafter] ?? drafter;
  return strings.tokens.origin[kind]?.(name, visible(rejected ?? ""), pass) ?? kind;
}

function Bar({ probability }) {
  return html`<span class="token-bar" aria-hidden="true"><i style=${{ width: `${Math.max(100 * probability, 0.5)}%` }}></i></span>`;
}

function Alternative({ token, current, onChoose }) {
  const probability = probabilityOf(token);
  const percent = strings.tokens.percent(probability);
  const text = visible(token.text);
  const note = current ? strings.tokens.written : token.special ? strings.tokens.special : "";
  return html`<li>
    <button
      type="button"
      class="token-alternative"
      disabled=${current}
      aria-label=${current ? strings.tokens.current(text, percent) : strings.tokens.alternative(text, percent, note)}
      title=${current ? note : strings.tokens.branch(text)}
      onClick=${() => onChoose(token.id)}
    >
      <code dir="auto">${text}</code>${note && html`<span class="quiet">${note}</span>`}
      <${Bar} probability=${probability} /><span class="token-percent">${percent}</span>
    </button>
  </li>`;
}

/** The alternatives to the first token of a piece, the token itself among them. */
function Alternatives({ piece, onChoose }) {
  const [first] = piece.tokens;
  // Parts of characters say nothing to a reader.
  const listed = first.top.filter((token) => token.text && !token.text.includes("\ufffd"));
  const chosen = listed.some((token) => token.id === first.id);
  const all = chosen || piece.tokens.length > 1 ? listed : [...listed, first];
  if (!all.length) return null;
  return html`<p class="token-heading">${strings.tokens.alternatives}</p>
    <ul class="token-alternatives">
      ${all.map(
        (token) =>
          html`<${Alternative} key=${token.id} token=${token} current=${token.id === first.id} onChoose=${onChoose} />`,
      )}
    </ul>`;
}

/** Puts the box under the token, or above it where there is more room. */
function place(box, anchor) {
  // A token that goes on in the next line has a rectangle in each.
  const { left, top, bottom } = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  if (width === document.documentElement.clientWidth) {
    anchor.scrollIntoView({ block: "nearest" }); // the box lies at the lower edge, and the token above it
    return;
  }
  const below = bottom + GAP + height + MARGIN <= innerHeight || top < innerHeight - bottom;
  const y = below ? Math.min(bottom + GAP, innerHeight - height - MARGIN) : Math.max(top - GAP - height, MARGIN);
  box.style.left = `${Math.max(MARGIN, Math.min(left, innerWidth - width - MARGIN))}px`;
  box.style.top = `${Math.max(y, MARGIN)}px`;
}

/**
 * The details of a piece, beside it.
 *
 * @param {object} props
 * @param {import("../token_pieces.js").Piece} props.piece
 * @param {HTMLElement} props.anchor the element of the piece
 * @param {boolean} props.pinned whether they stay when the pointer leaves
 * @param {boolean} props.focus whether the focus goes into them
 * @param {((alternative: number) => void)|null} props.onChoose called with the id of the alternative to branch with
 * @param {(refocus: boolean) => void} props.onClose
 * @param {(inside: boolean) => void} props.onHover
 */
export function TokenDetails({ piece, anchor, pinned, focus, onChoose, onClose, onHover }) {
  const box = useRef(null);
  useLayoutEffect(() => place(box.current, anchor), [piece, anchor]);
  useLayoutEffect(() => {
    if (focus) box.current.querySelector("button:enabled")?.focus();
  }, [focus, piece]);
  // Not after the next frame: the details may be closed by then.
  useLayoutEffect(() => {
    const moved = () => (pinned && anchor.isConnected ? place(box.current, anchor) : onClose(false));
    const pressed = (event) => {
      const inside = box.current.contains(event.target) || event.target.closest?.(".token-text") === anchor.parentNode;
      if (!inside) onClose(false);
    };
    const options = { capture: true, passive: true };
    addEventListener("scroll", moved, options);
    addEventListener("resize", moved);
    addEventListener("pointerdown", pressed, true);
    return () => {
      removeEventListener("scroll", moved, options);
      removeEventListener("resize", moved);
      removeEventListener("pointerdown", pressed, true);
    };
  }, [pinned, anchor, onClose]);
  const press = (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation();
      onClose(true);
      return;
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const buttons = [...box.current.querySelectorAll("button:enabled")];
    const next = buttons[buttons.indexOf(document.activeElement) + step];
    event.preventDefault();
    event.stopPropagation();
    next?.focus();
  };
  const left = (event) => event.relatedTarget && !box.current.contains(event.relatedTarget) && onClose(false);
  const percent = strings.tokens.percent(piece.probability);
  const details = html`<div
    ref=${box}
    class="token-details"
    role="dialog"
    aria-label=${strings.tokens.details(visible(piece.text))}
    onKeyDown=${press}
    onFocusOut=${left}
    onPointerEnter=${() => onHover(true)}
    onPointerLeave=${() => onHover(false)}
  >
    <header>
      <code class="token-name" dir="auto">${visible(piece.text)}</code>
      <span class="quiet">${strings.tokens.ids(piece.tokens.map((token) => token.id))}</span>
      <${IconButton} icon="close" label=${strings.common.close} onClick=${() => onClose(true)} />
    </header>
    <p class="token-probability"><${Bar} probability=${piece.probability} /><b>${percent}</b></p>
    <p>${originOf(piece)}</p>
    ${piece.tokens.length > 1 && html`<p class="quiet">${strings.tokens.parts(piece.tokens.length)}</p>`}
    ${onChoose && html`<${Alternatives} piece=${piece} onChoose=${onChoose} />`}
  </div>`;
  return createPortal(details, document.body);
}
