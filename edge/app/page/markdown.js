/** Shows Markdown of a model's answer: safely, and cheaply while it grows. */

import { Component, h, html, useLayoutEffect, useMemo, useRef, useState } from "edgerun/preact";
import { BlockSplitter } from "./markdown/blocks.js";
import { CodeBlock } from "./markdown/code.js";
import { elementsOf, tooLarge } from "./markdown/elements.js";
import { Formula } from "./markdown/formula.js";
import { parseBlock } from "./markdown/parser.js";

/** Length from which a block that grows is not parsed at every change, in characters. */
const LONG_BLOCK = 8000;
/** Such a block is parsed again when it has grown by this factor. */
const GROWTH = 1.05;
/** Number of blocks that are compared, and left out of the layout while they are not visible, together. */
const PART = 40;

/** A block; it is made again only when its source changes. */
class Block extends Component {
  #source = null;
  #parsed = null;

  shouldComponentUpdate({ block, writing }) {
    return block !== this.props.block || writing !== this.props.writing;
  }

  render({ block, writing }) {
    return h("div", { class: "md-block", dir: "auto" }, this.#content(block, writing));
  }

  #content(block, writing) {
    if (block.kind === "plain") return tooLarge(block.source);
    if (block.kind === "code") return h(CodeBlock, { code: block.code, language: block.language, open: writing && !block.closed });
    if (block.kind === "formula" && block.closed) return h(Formula, { formula: block.formula, display: true });
    if (block.kind === "formula" && writing) return h("p", { class: "md-unfinished" }, h("code", null, block.formula.trim()));
    return this.#text(block.source, writing && !block.closed);
  }

  #text(source, open) {
    const before = this.#source ?? "";
    const again = !open || before.length < LONG_BLOCK || source.length > before.length * GROWTH || !source.startsWith(before);
    if (again) {
      this.#source = source;
      this.#parsed = parseBlock(source);
    }
    const shown = this.#parsed ? elementsOf(this.#parsed) : tooLarge(this.#source);
    return again || this.#source === source ? shown : [shown, h("p", { class: "md-raw" }, source.slice(this.#source.length))];
  }
}

/** Neighbouring blocks; they are looked at again only when one of them has changed. */
class Part extends Component {
  shouldComponentUpdate({ blocks, writing, last }) {
    const { props } = this;
    const same = blocks.length === props.blocks.length && blocks.every((block, index) => block === props.blocks[index]);
    return !same || writing !== props.writing || last !== props.last;
  }

  render({ blocks, writing, last }) {
    const end = blocks.length - 1;
    return h(
      "div",
      { class: last ? "md-part" : "md-part md-apart" },
      blocks.map((block, index) => h(Block, { key: block.start, block, writing: writing && last && index === end })),
    );
  }
}

/** The address of the link under the pointer or the focus, at the lower edge of what is visible of the answer. */
function LinkAddress({ box }) {
  const [address, setAddress] = useState("");
  useLayoutEffect(() => {
    const element = box.current;
    const addressOf = (event) => event.target.closest("a")?.href ?? "";
    // A pointer that rests on text, while the text moves under it, leaves the address of the link with the focus.
    let hovered = "";
    let focused = "";
    const point = (address) => {
      hovered = address;
      setAddress(hovered || focused);
    };
    const focus = (address) => {
      focused = address;
      setAddress(hovered || focused);
    };
    const events = {
      pointerover: (event) => point(addressOf(event)),
      pointerleave: () => point(""),
      focusin: (event) => focus(addressOf(event)),
      focusout: () => focus(""),
    };
    for (const [name, listener] of Object.entries(events)) element.addEventListener(name, listener);
    return () => Object.entries(events).forEach(([name, listener]) => element.removeEventListener(name, listener));
  }, []);
  return address && html`<div class="md-address" aria-hidden="true"><bdi>${address.slice(0, 500)}</bdi></div>`;
}

/**
 * A model's answer.
 *
 * @param {{text: string, writing?: boolean}} props text: Markdown; writing: whether more of it is to come
 */
export function Markdown({ text, writing = false }) {
  const box = useRef(null);
  const splitter = useRef(null);
  splitter.current ??= new BlockSplitter();
  const blocks = splitter.current.split(text);
  const address = useMemo(() => h(LinkAddress, { box }), []);
  const parts = [];
  for (let at = 0; at < blocks.length; at += PART) {
    parts.push(h(Part, { key: at, blocks: blocks.slice(at, at + PART), writing, last: at + PART >= blocks.length }));
  }
  return html`<div class="md" ref=${box}>
    ${parts}
    ${address}
  </div>`;
}
