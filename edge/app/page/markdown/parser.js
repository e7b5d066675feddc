/** Parses one block of Markdown within limits of size and nesting. */

import { Marked } from "marked";

/** Longest block that is parsed, in characters, without the images that it holds. */
const MAX_LENGTH = 30_000;
/** Longest word of the characters in which e-mail addresses are looked for, whose cost grows with the square. */
const LONG_WORD = /[\w.!#$%&'*+/=?`{|}~-]{1000}/;
/** Deepest nesting of lists and quotes on one line, or by indentation in columns. */
const DEEP_LINE = /^(?:[ \t]*(?:>|[-*+](?=\s)|\d{1,9}[.)](?=\s))){12}|^[ \t]{60,}(?:>|[-*+]\s|\d{1,9}[.)]\s)/m;
const DATA_IMAGE = /\(\s*(data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+)\s*\)/g;
/** Longest address of an image that an answer holds itself, in characters. */
const MAX_IMAGE = 2_000_000;

const DISPLAY = /^(?:\$\$([^$]{1,4000})\$\$|\\\[([\s\S]{1,4000}?)\\\])/;
const INLINE = /^(?:\$(?![\s$])((?:[^$\\\n]|\\[^\n]){1,1000}?)(?<!\s)\$(?![0-9A-Za-z$])|\\\(([\s\S]{1,2000}?)\\\))/;

/**
 * Tells a formula from prices: "$5 and $6" is refused by its blanks, "$5-$6" by the digit that follows, and "$5, or 6$ with
 * tax" because words follow a number.
 */
function isFormula(content, tokens) {
  if (/[0-9A-Za-z]$/.test(tokens?.at(-1)?.raw ?? "")) return false;
  return !(/^[\d.,]+(?:\s|$|,)/.test(content) && /(?:^|\s)[A-Za-z]{2,}/.test(content));
}

const formula = {
  name: "formula",
  level: "inline",
  start: (source) => source.search(/\$|\\[([]/),
  tokenizer(source, tokens) {
    const display = DISPLAY.exec(source);
    if (display) return { type: "formula", raw: display[0], formula: display[1] ?? display[2], display: true };
    const inline = INLINE.exec(source);
    if (!inline) return undefined;
    if (inline[1] !== undefined && !isFormula(inline[1], tokens)) return undefined;
    return { type: "formula", raw: inline[0], formula: inline[1] ?? inline[2], display: false };
  },
};

const marked = new Marked({ gfm: true, breaks: true }, { extensions: [formula] });

/**
 * Parses a block.
 *
 * @param {string} source
 * @returns {{tokens: Array<object>, images: Array<string>}|null} marked's tokens, and the images that the block holds: an
 *   address "data:N" stands for the N-th; null for a block that is beyond a limit
 */
export function parseBlock(source) {
  const images = [];
  const short = source.replace(DATA_IMAGE, (whole, address) => {
    if (address.length > MAX_IMAGE) return whole;
    images.push(address);
    return `(data:${images.length - 1})`;
  });
  if (short.length > MAX_LENGTH || LONG_WORD.test(short) || DEEP_LINE.test(short)) return null;
  try {
    return { tokens: marked.lexer(short), images };
  } catch (error) {
    // Text that nests deeper than the stack has room is shown as it is.
    if (error instanceof RangeError) return null;
    throw error;
  }
}
