/** The same answer with and without drafting, side by side while both are written. */

import { html, useEffect, useRef, useState } from "edgerun/preact";

import { attempt, useStore } from "../store.js";
import { strings } from "../strings.js";
import { getComparison, startComparison, stopComparison, useFollowed } from "./model_api.js";
import { ModelPage, ModelSelect } from "./model_page.js";

const words = strings.comparison;
const LENGTHS = [64, 128, 256, 512, 1024];

function Side({ name, side, running, differs }) {
  const text = useRef(null);
  useEffect(() => {
    const element = text.current;
    if (running && element.scrollHeight - element.scrollTop - element.clientHeight < 120) {
      element.scrollTop = element.scrollHeight;
    }
  }, [side.text, running]);
  const [same, different] = differs === null ? [side.text, ""] : [side.text.slice(0, differs), side.text.slice(differs)];
  return html`<section class="race-side" aria-label=${name}>
    <h2>${name}</h2>
    <p class="race-rate">
      <strong>${side.tokens_per_second === null ? "–" : side.tokens_per_second.toFixed(1)}</strong> ${words.rate}
    </p>
    <p class="quiet">${words.counts(side)}</p>
    <div class="race-text" ref=${text} tabindex="0" role="region" aria-label=${words.textOf(name)}>
      ${same}${different && html`<mark>${different}</mark>`}
    </div>
  </section>`;
}

function Race({ comparison }) {
  const running = comparison.state === "loading" || comparison.state === "running";
  return html`<div class="race" data-state=${comparison.state}>
    <div class="race-sides">
      <${Side} name=${words.plain} side=${comparison.plain} running=${running} differs=${comparison.differs_at} />
      <${Side} name=${words.drafted} side=${comparison.drafted} running=${running} differs=${comparison.differs_at} />
    </div>
    <div aria-live="polite">
      ${comparison.summary && html`<p class="race-summary">${comparison.summary}</p>`}
      ${comparison.state === "stopped" && html`<p class="quiet">${words.stopped}</p>`}
      ${comparison.state === "failed" && html`<p class="fault">${comparison.error}</p>`}
    </div>
  </div>`;
}

/** The page of the comparison. */
export function ComparisonPage() {
  const standard = useStore((state) => state.defaultModel ?? state.models[0]?.id);
  const models = useStore((state) => state.models);
  const conversations = useStore((state) => state.conversations);
  const [chosen, setChosen] = useState(null);
  const [prompt, setPrompt] = useState(null);
  const [conversation, setConversation] = useState("");
  const [length, setLength] = useState(256);
  const [got, setGot] = useFollowed(getComparison, { comparison: (_value, { comparison }) => ({ comparison }) });
  const comparison = got?.comparison;
  const running = comparison?.state === "loading" || comparison?.state === "running";
  const model = chosen ?? (running ? comparison.model : standard);
  const bundled = models.find((each) => each.id === model)?.bundled;
  const typed = prompt ?? (bundled ? words.shellPrompt : words.chatPrompt);
  const start = (event) => {
    event.preventDefault();
    const what = conversation ? { conversation } : { prompt: typed };
    attempt(async () => setGot(await startComparison({ ...what, model, max_tokens: length })));
  };
  return html`<${ModelPage} current="compare">
    <p>${words.introduction}</p>
    <form class="stack" onSubmit=${start}>
      <div class="model-form">
        <${ModelSelect} label=${words.model} value=${model} onChange=${setChosen} disabled=${running} />
        <label class="field"
          ><span>${words.from}</span>
          <select value=${conversation} disabled=${running} onChange=${(event) => setConversation(event.target.value)}>
            <option value="">${words.typed}</option>
            ${conversations.slice(0, 50).map(
              (each) => html`<option key=${each.id} value=${each.id}>${each.title || strings.sidebar.untitled}</option>`,
            )}
          </select>
        </label>
        <label class="field"
          ><span>${words.length}</span>
          <select value=${length} disabled=${running} onChange=${(event) => setLength(Number(event.target.value))}>
            ${LENGTHS.map((value) => html`<option key=${value} value=${value}>${strings.common.tokens(value)}</option>`)}
          </select>
        </label>
      </div>
      ${!conversation &&
      html`<label class="field"
        ><span>${words.prompt}</span>
        <textarea rows="3" value=${typed} disabled=${running} onInput=${(event) => setPrompt(event.target.value)}></textarea>
      </label>`}
      <p class="button-row">
        ${running
          ? html`<button type="button" class="button" onClick=${() => attempt(stopComparison)}>${words.stop}</button>`
          : html`<button class="button primary" disabled=${!model || (!conversation && !typed.trim())}>${words.start}</button>`}
        ${comparison?.state === "loading" && html`<span class="quiet" role="status">${words.loading}</span>`}
      </p>
    </form>
    ${comparison && html`<${Race} comparison=${comparison} />`}
    <details class="model-more">
      <summary>${words.how}</summary>
      <p class="quiet">${words.howAbout}</p>
    </details>
  <//>`;
}
