/** The tokens of an answer as pieces of its text, and what they add up to. */

const PART = "\ufffd"; // the text of a token that is a part of a character
const LEVELS = [0.9, 0.7, 0.5, 0.3, 0.1];

/**
 * One piece of an answer: a token, or several tokens that make up one character or a few.
 *
 * @typedef {object} Piece
 * @property {number} index of its first token
 * @property {object[]} tokens as the server gives them
 * @property {string} text
 * @property {boolean} special whether it is a special token, which is not part of the text
 * @property {number} probability of all its tokens together
 */

/** Probability of a token, 0 to 1. */
export const probabilityOf = (token) => Math.exp(token.logprob);

/** Level of a probability: 0 for the likely, 5 for the unlikely. */
export function levelOf(probability) {
  const level = LEVELS.findIndex((least) => probability >= least);
  return level < 0 ? LEVELS.length : level;
}

/** Where the tokens begin in the text: an answer that was continued from an edited text has fewer tokens than text. */
function beginning(content, tokens) {
  const part = tokens.findIndex((token) => token.text.includes(PART));
  const known = tokens.slice(0, part < 0 ? undefined : part).filter((token) => !token.special);
  const head = known.map((token) => token.text).join("");
  if (content.startsWith(head)) return 0;
  return Math.max(part < 0 ? content.lastIndexOf(head) : content.indexOf(head), 0);
}

/** End of the characters that the tokens from `first` to `next` make up. */
function endOfParts(content, start, tokens, first, next) {
  const following = tokens.slice(next).find((token) => token.text && !token.special);
  const most = Math.min(start + 2 * (next - first), content.length); // a token has one byte at least
  if (!following) return content.length;
  const found = content.indexOf(following.text, Math.min(start + 1, content.length));
  return found < 0 || found > most ? most : found;
}

/**
 * Splits an answer into its tokens.
 *
 * @param {string} content the answer
 * @param {object[]} tokens its tokens, as the server gives them
 * @returns {{before: string, pieces: Piece[], after: string}} with the text before and after, of which no tokens are known
 */
export function splitIntoPieces(content, tokens) {
  const start = beginning(content, tokens);
  const pieces = [];
  let at = start;
  let whole = true;
  const add = (index, end, text, special = false) => {
    const own = tokens.slice(index, end);
    const probability = Math.exp(own.reduce((sum, token) => sum + token.logprob, 0));
    pieces.push({ index, tokens: own, text, special, probability });
  };
  for (let index = 0; index < tokens.length; ) {
    const { text, special } = tokens[index];
    if (special && !content.startsWith(text, at)) {
      add(index, index + 1, text, true);
      index += 1;
    } else if (text.includes(PART)) {
      let next = index + 1;
      while (next < tokens.length && tokens[next].text.includes(PART)) next += 1;
      const end = endOfParts(content, at, tokens, index, next);
      add(index, next, content.slice(at, end) || PART);
      at = end;
      index = next;
    } else {
      const rest = content.slice(at, at + text.length);
      const fits = text.startsWith(rest); // a stop sequence may begin within the last token
      whole &&= fits;
      add(index, index + 1, fits && rest ? rest : text);
      at += fits ? rest.length : 0;
      index += 1;
    }
  }
  return whole ? { before: content.slice(0, start), pieces, after: content.slice(at) } : { before: "", pieces, after: "" };
}

/**
 * What the tokens of an answer add up to.
 *
 * @returns {{tokens: number, accepted: number, passes: number, mean: number, drafters: Map<string, number>,
 *   kinds: Map<string, number>, filled: Map<number, number>}} mean: the mean probability; drafters: accepted tokens by
 *   drafter; filled: tokens by the pass over their block
 */
export function summaryOf(tokens) {
  const drafters = new Map();
  const kinds = new Map();
  const filled = new Map();
  const count = (counts, name) => counts.set(name, (counts.get(name) ?? 0) + 1);
  let probability = 0;
  for (const token of tokens) {
    probability += probabilityOf(token);
    count(kinds, token.kind);
    if (token.kind === "accepted") count(drafters, token.drafter);
    if (token.kind === "filled") count(filled, token.block_pass);
  }
  const accepted = kinds.get("accepted") ?? 0;
  const passes = tokens.length - accepted - (kinds.get("chosen") ?? 0);
  return { tokens: tokens.length, accepted, passes, mean: tokens.length ? probability / tokens.length : 0, drafters, kinds, filled: new Map([...filled].sort()) };
}
