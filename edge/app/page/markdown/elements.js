/**
 * Makes elements of marked's tokens.
 *
 * Every element is named here and every text is a text node, so nothing in an answer can become markup: its raw HTML is
 * shown as text, but for line breaks, sub- and superscripts and keys.
 */

import { Fragment, h } from "edgerun/preact";
import { strings } from "../strings.js";
import { CodeBlock } from "./code.js";
import { Formula } from "./formula.js";
import { Image, Link } from "./links.js";

/** Deepest nesting of tokens; what lies deeper is shown as its source. */
const MAX_DEPTH = 24;
/** Most cells of a table. */
const MAX_CELLS = 5000;
/** How far behind a tag its end is looked for, in tokens. */
const TAG_REACH = 50;

const entities = new Map();
const decoder = document.createElement("textarea");

/** Text with character references such as `&amp;` replaced by what they mean. */
function decoded(text) {
  return text.replace(/&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});/g, (reference) => {
    if (!entities.has(reference)) {
      // The reference holds no markup, and a text area would not make elements of any.
      decoder.innerHTML = reference;
      entities.set(reference, decoder.value);
    }
    return entities.get(reference);
  });
}

/** What a reader sees of tokens, as far as a host name may stand in it. */
function plainText(tokens) {
  return tokens.map((token) => (token.tokens ? plainText(token.tokens) : decoded(token.text ?? ""))).join("").slice(0, 500);
}

/** A tag that answers may use, and where it ends; null for any other. */
function allowedTag(tokens, index) {
  const name = /^<(sub|sup|kbd)>$/i.exec(tokens[index].raw)?.[1].toLowerCase();
  if (!name) return null;
  const end = tokens.slice(index + 1, index + TAG_REACH).findIndex((token) => token.raw.toLowerCase() === `</${name}>`);
  return end < 0 ? null : { name, end: index + 1 + end };
}

function inlineElements(tokens, context) {
  const elements = [];
  for (let index = 0; index < tokens.length; index += 1) {
    const tag = tokens[index].type === "html" ? allowedTag(tokens, index) : null;
    if (tag) {
      elements.push(h(tag.name, null, inlineElements(tokens.slice(index + 1, tag.end), deeper(context))));
      index = tag.end;
    } else {
      elements.push(inlineElement(tokens[index], context));
    }
  }
  return elements;
}

function deeper(context) {
  return { ...context, depth: context.depth + 1 };
}

function inlineElement(token, context) {
  if (context.depth > MAX_DEPTH) return token.raw;
  const inside = () => inlineElements(token.tokens, deeper(context));
  switch (token.type) {
    case "text":
      return token.tokens ? inside() : decoded(token.text);
    case "escape":
      return token.text;
    case "codespan":
      return h("code", null, token.text);
    case "strong":
      return h("strong", null, inside());
    case "em":
      return h("em", null, inside());
    case "del":
      return h("del", null, inside());
    case "br":
      return h("br");
    case "link":
      return h(Link, { address: decoded(token.href), text: plainText(token.tokens) }, inside());
    case "image":
      return h(Image, { address: token.href, description: token.text, images: context.images });
    case "formula":
      return h(Formula, { formula: token.formula, display: token.display });
    case "html":
      return /^<br\s*\/?>$/i.test(token.raw) ? h("br") : token.raw;
    default:
      return blockElement(token, context);
  }
}

function table(token, context) {
  if ((token.rows.length + 1) * token.header.length > MAX_CELLS) return tooLarge(token.raw);
  const cells = (row, name) =>
    row.map((cell) =>
      h(name, { class: cell.align ? `md-${cell.align}` : null, ...(name === "th" && { scope: "col" }) }, inlineElements(cell.tokens, deeper(context))),
    );
  return h(
    "div",
    { class: "md-table", tabIndex: 0, role: "group", "aria-label": strings.markdown.table },
    h(
      "table",
      null,
      h("thead", null, h("tr", null, cells(token.header, "th"))),
      h("tbody", null, token.rows.map((row) => h("tr", null, cells(row, "td")))),
    ),
  );
}

function list(token, context) {
  const items = token.items.map((item) => h("li", null, blockElements(item.tokens, deeper(context))));
  return token.ordered ? h("ol", token.start === 1 ? null : { start: token.start }, items) : h("ul", null, items);
}

function blockElement(token, context) {
  if (context.depth > MAX_DEPTH) return token.raw;
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "paragraph":
      return h("p", null, inlineElements(token.tokens, deeper(context)));
    case "heading":
      // The page's own heading comes first in its outline.
      return h(`h${Math.min(token.depth + 1, 6)}`, { class: `md-h${token.depth}` }, inlineElements(token.tokens, deeper(context)));
    case "code":
      return h(CodeBlock, { code: token.text, language: (token.lang ?? "").trim().split(/\s+/)[0] });
    case "blockquote":
      return h("blockquote", null, blockElements(token.tokens, deeper(context)));
    case "list":
      return list(token, context);
    case "table":
      return table(token, context);
    case "hr":
      return h("hr");
    case "checkbox": {
      const name = strings.markdown.task(token.checked);
      return h("span", { class: "md-task", role: "img", "aria-label": name }, token.checked ? "☑ " : "☐ ");
    }
    case "html":
      return h("p", { class: "md-raw" }, token.raw.trimEnd());
    default:
      return token.tokens || token.type === "text" ? inlineElement({ ...token, type: "text" }, context) : token.raw;
  }
}

function blockElements(tokens, context) {
  return tokens.map((token) => blockElement(token, context));
}

/**
 * Source that is beyond a limit, as it is, with a note that says so.
 *
 * @param {string} source
 */
export function tooLarge(source) {
  return h(Fragment, null, h("p", { class: "md-raw" }, source), h("p", { class: "md-note" }, strings.markdown.tooLarge));
}

/**
 * Elements of a parsed block.
 *
 * @param {{tokens: Array<object>, images: Array<string>}} parsed as `parseBlock` gives it
 */
export function elementsOf({ tokens, images }) {
  return blockElements(tokens, { images, depth: 0 });
}
