/** How much of the model's context a conversation fills, and what will be left out. */

import { html, useEffect, useState } from "edgerun/preact";

import { measureContext } from "../api.js";
import { conversationOf, state, useStore } from "../store.js";
import { strings } from "../strings.js";

const NEARLY_FULL = 0.85;

/**
 * The meter beside the composer.
 *
 * @param {object} props
 * @param {string|null} props.id the conversation; null has nothing to measure
 * @param {string|null} props.leaf
 * @param {object} props.draft ref of what is typed
 * @param {number} props.edits changes when the draft has
 * @param {string|undefined} props.writing the answer in progress
 */
export function ContextMeter({ id, leaf, draft, edits, writing }) {
  const [fit, setFit] = useState(null);
  const models = useStore((current) => current.models);
  // What the prompt and its length depend on besides the messages; undefined for a conversation that is not known.
  const settings = useStore(() => {
    const conversation = conversationOf(id);
    return conversation && JSON.stringify([conversation.system, conversation.sampling, conversation.model]);
  });
  const known = settings !== undefined;
  useEffect(() => {
    if (!known || writing) return undefined;
    const abort = new AbortController();
    const { text, attachments } = draft.current;
    const files = attachments.map(({ name, text: content, image }) => ({ name, text: content, image }));
    measureContext(id, text, files, abort.signal).then(
      (got) => setFit(got.problem ? { error: got.problem } : got.tokens == null ? null : got),
      (error) => error.name !== "AbortError" && setFit(error.code === "unreachable" ? null : { error: error.message }),
    );
    return () => abort.abort();
  }, [id, settings, leaf, edits, writing, models]);
  if (!fit || !known) return null;
  if (fit.error) return html`<span class="meter full" role="status" title=${fit.error}>${fit.error}</span>`;
  const share = Math.min(1, (fit.tokens + (fit.reserve ?? 0)) / fit.context);
  const tree = state.trees.get(id);
  const turns = fit.trimmed.filter((message) => tree?.messages.get(message)?.role === "user").length;
  // A window of the newest tokens cuts the prompt itself, and not at the borders of turns.
  const cut = fit.tokens >= fit.context;
  const level = turns || cut ? "full" : share > NEARLY_FULL ? "near" : "";
  return html`<span class=${`meter ${level}`} title=${strings.meter.explanation(fit)}>
    ${level &&
    html`<span class="meter-note">${turns ? strings.meter.trims(turns) : cut ? strings.meter.cut : strings.meter.nearlyFull}</span>`}
    <meter min="0" max=${fit.context} value=${fit.tokens} aria-label=${strings.meter.label}></meter>
    <span class="meter-numbers">${strings.meter.numbers(fit.tokens, fit.context)}</span>
  </span>`;
}
