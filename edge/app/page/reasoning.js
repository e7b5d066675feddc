/** Tells a model's reasoning from its answer. */

const START = /^\s*<think(?:ing)?>/;
const END = /<\/think(?:ing)?>\s*/;

/**
 * Splits an answer into its reasoning and the rest. A template may have written the opening tag already.
 *
 * @param {string} content
 * @returns {{reasoning: string|null, finished: boolean, answer: string}}
 */
export function splitReasoning(content) {
  const end = END.exec(content);
  const start = START.exec(content);
  if (!start && !end) return { reasoning: null, finished: true, answer: content };
  if (!start && content.slice(0, end.index).includes("```")) return { reasoning: null, finished: true, answer: content };
  const from = start ? start[0].length : 0;
  if (!end) return { reasoning: content.slice(from), finished: false, answer: "" };
  const reasoning = content.slice(from, end.index).trim();
  return { reasoning: reasoning || null, finished: true, answer: content.slice(end.index + end[0].length) };
}
