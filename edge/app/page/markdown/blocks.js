/**
 * Splits Markdown into blocks that can be parsed apart, so that text which grows is not parsed from its start again.
 *
 * A block ends where nothing that follows can change it: at a blank line that does not continue a list, before and after
 * fenced code, and before and after a formula that has lines of its own.
 */

const FENCE = /^ {0,3}(`{3,}(?!.*`)|~{3,})(.*)$/;
const INNER_FENCE = /^[\s>]*(?:(?:[-*+]|\d{1,9}[.)])\s+)?(`{3,}(?!.*`)|~{3,})/;
const LIST_ITEM = /^ {0,3}(?:[-*+]|\d{1,9}[.)])(?:\s|$)/;
/** A list item that ends a paragraph, and is no row of a table. */
const FIRST_ITEM = /^ {0,3}(?:[-*+]|1[.)])\s+[^\s|][^|]*$/;
const INDENTED = /^(?: {2,}|\t)\S/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const ENDS = { $$: "$$", "\\[": "\\]" };

/** Length from which a list is divided between two of its items, in characters. */
const LONG_LIST = 4000;
/** Length from which a block is divided at the next line, in characters. */
const LONG_BLOCK = 100_000;
/** Longest formula with lines of its own, in characters. */
const LONG_FORMULA = 10_000;
/** Number of blocks after which the rest is one block of plain text. */
export const MAX_BLOCKS = 10_000;

/** The line that begins at `at`: without its end, and where the next one begins. */
function lineAt(text, at) {
  const end = text.indexOf("\n", at);
  return end < 0 ? { line: text.slice(at), next: text.length } : { line: text.slice(at, end), next: end + 1 };
}

function isBlank(line) {
  return line.trim() === "";
}

/** A fenced code block that begins at `start` with the line `opening`. */
function fencedCode(text, start, opening) {
  const [, fence, info] = opening;
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  const body = lineAt(text, start).next;
  let at = body;
  while (at < text.length) {
    const { line, next } = lineAt(text, at);
    if (closing.test(line)) return codeBlock(text, start, body, at, next, info, true);
    at = next;
  }
  return codeBlock(text, start, body, text.length, text.length, info, false);
}

function codeBlock(text, start, body, bodyEnd, end, info, closed) {
  const code = text.slice(body, bodyEnd);
  return {
    kind: "code",
    start,
    end,
    source: text.slice(start, end),
    language: info.trim().split(/\s+/)[0],
    code: closed || code.endsWith("\n") ? code.replace(/\n$/, "") : code,
    closed,
  };
}

/** A formula with lines of its own that begins at `start`; null if the text there is something else. */
function formulaBlock(text, start) {
  const { line } = lineAt(text, start);
  const opening = FORMULA.exec(line);
  if (!opening) return null;
  const from = start + opening[0].length;
  const closing = ENDS[opening[1]];
  const end = text.indexOf(closing, from);
  const blank = text.slice(from, from + LONG_FORMULA).search(/\n[ \t]*\n/);
  const limit = blank < 0 ? from + LONG_FORMULA : from + blank;
  if (end < 0) {
    if (limit < text.length || opening[1] === text.slice(start).trim()) return null;
    return { kind: "formula", start, end: text.length, source: text.slice(start), formula: text.slice(from), closed: false };
  }
  if (end > limit || end === from) return null;
  const { line: after, next } = lineAt(text, end + closing.length);
  // Text after the formula makes it a part of a paragraph.
  if (!/^\s*[.,;]?\s*$/.test(after)) return null;
  const formula = text.slice(from, end) + after.trim();
  return { kind: "formula", start, end: next, source: text.slice(start, next), formula, closed: true };
}

/** Where the text block that begins at `start` ends. */
function textEnd(text, start) {
  const isList = LIST_ITEM.test(lineAt(text, start).line);
  const isIndented = /^(?: {4}|\t)/.test(lineAt(text, start).line);
  let fence = null;
  let at = start;
  while (at < text.length) {
    const { line, next } = lineAt(text, at);
    if (at - start > LONG_BLOCK) return at;
    const inFence = fence !== null;
    if (inFence) {
      if (new RegExp(`^[\\s>]*${fence[0]}{${fence.length},}\\s*$`).test(line)) fence = null;
    } else if (isBlank(line)) {
      let following = next;
      while (following < text.length && isBlank(lineAt(text, following).line)) following = lineAt(text, following).next;
      const after = lineAt(text, following).line;
      const continues = isList ? LIST_ITEM.test(after) || INDENTED.test(after) : isIndented && /^(?: {4}|\t)/.test(after);
      if (!continues) return following;
    } else if (at > start) {
      if (FENCE.test(line) && !(isList && INDENTED.test(line))) return at;
      if (isList && at - start > LONG_LIST && LIST_ITEM.test(line) && !line.startsWith(" ")) return at;
      if (!isList && (FIRST_ITEM.test(line) || (FORMULA.test(line) && formulaBlock(text, at)))) return at;
    }
    if (!inFence) fence = INNER_FENCE.exec(line)?.[1] ?? null;
    at = next;
  }
  return text.length;
}

function blockAt(text, start) {
  const opening = FENCE.exec(lineAt(text, start).line);
  if (opening) return fencedCode(text, start, opening);
  const formula = formulaBlock(text, start);
  if (formula) return formula;
  const end = textEnd(text, start);
  return { kind: "text", start, end, source: text.slice(start, end), closed: end < text.length };
}

/** Divides a text, and again after it has grown; blocks that stay the same stay the same objects. */
export class BlockSplitter {
  #text = "";
  #blocks = [];

  /**
   * Divides a text into blocks.
   *
   * @param {string} text
   * @returns {Array<{kind: "text"|"code"|"formula"|"plain", start: number, end: number, source: string, closed: boolean}>}
   *   the blocks; code has `language` and `code` too, a formula has `formula`
   */
  split(text) {
    if (text === this.#text) return this.#blocks;
    // The end of the last block but one depends on what the last one begins with.
    const kept = text.startsWith(this.#text) ? Math.max(0, this.#blocks.length - 2) : 0;
    const blocks = this.#blocks.slice(0, kept);
    let at = kept ? blocks[kept - 1].end : 0;
    while (at < text.length) {
      const { line, next } = lineAt(text, at);
      if (isBlank(line)) {
        at = next;
        continue;
      }
      let block =
        blocks.length < MAX_BLOCKS
          ? blockAt(text, at)
          : { kind: "plain", start: at, end: text.length, source: text.slice(at), closed: true };
      const before = this.#blocks[blocks.length];
      const same = ["kind", "start", "source", "closed"].every((name) => before?.[name] === block[name]);
      if (same) block = before;
      blocks.push(block);
      at = block.end;
    }
    this.#text = text;
    this.#blocks = blocks;
    return blocks;
  }
}
