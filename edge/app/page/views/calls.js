/** Calls of tools in an answer: cards with arguments and results, and the question whether to run them. */

import { html, useState } from "edgerun/preact";

import { Icon } from "../icons.js";
import { attempt, decideCall } from "../store.js";
import { strings } from "../strings.js";

const words = strings.calls;
const SHOWN_RESULT = 20000;

/** The arguments with indentation, or as they are where they are not JSON. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Whether an answer waits for the user: calls have no result, and it is still being written. */
export function awaitsDecision(message) {
  return message.state === "writing" && message.rounds?.at(-1)?.calls.some((call) => call.state === "waiting");
}

/** Whether calls of an answer have no results, so that no text can follow yet. */
export function hasOpenCalls(message) {
  return message.rounds?.at(-1)?.calls.some((call) => call.result === null) ?? false;
}

function Decisions({ message, call }) {
  const [sent, setSent] = useState(false);
  const decide = (decision) => async () => {
    setSent(true);
    if (!(await attempt(() => decideCall(message, call.id, decision)))) setSent(false);
  };
  return html`<div class="call-decisions">
    <button type="button" class="button small primary" disabled=${sent} onClick=${decide("run")}>${words.run}</button>
    <button type="button" class="button small" disabled=${sent} onClick=${decide("refuse")}>${words.refuse}</button>
    <button type="button" class="button small" disabled=${sent} onClick=${decide("always")}>${words.always}</button>
  </div>`;
}

function CallCard({ message, call }) {
  const writing = message.state === "writing";
  const waits = writing && call.state === "waiting";
  const state = call.result === null && !writing ? "open" : call.state;
  return html`<section class=${`call ${state}`} data-call=${state} aria-label=${words.label(call.name)}>
    <header class="call-header">
      <${Icon} name="tool" />
      <span class="call-name">${call.name}</span>
      <span class="call-state">${words.states[state]}</span>
    </header>
    <pre class="call-text" tabindex="0" aria-label=${words.arguments}>${pretty(call.arguments)}</pre>
    ${waits && html`<${Decisions} message=${message} call=${call} />`}
    ${call.result !== null &&
    call.state !== "refused" &&
    html`<p class="call-label">${words.result}</p>
      <pre class="call-text result" tabindex="0" aria-label=${words.result}>${call.result.slice(0, SHOWN_RESULT)}</pre>`}
  </section>`;
}

/** The calls of one round. */
export function CallList({ message, calls }) {
  return html`<div class="calls">
    ${calls.map((call) => html`<${CallCard} key=${call.id} message=${message} call=${call} />`)}
  </div>`;
}
