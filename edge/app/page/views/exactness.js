/** The exactness report: whether drafting changes what a model writes on this machine, in plain words. */

import { html, useState } from "edgerun/preact";

import { attempt, useStore } from "../store.js";
import { strings } from "../strings.js";
import { cancelCheck, getExactness, startCheck, useFollowed } from "./model_api.js";
import { ModelPage, ModelSelect } from "./model_page.js";

const words = strings.exactness;
const LIMITS = [1, 3, 8];

function Report({ entry }) {
  const { report } = entry;
  return html`<article class=${report.passed ? "report-card good" : "report-card poor"}>
    <h2>${report.result}</h2>
    <p>${report.meaning}</p>
    <p class="quiet">${words.counts}</p>
    <div class="table-scroller" tabindex="0" role="region" aria-label=${words.counts}>
      <table class="model-table">
        <thead>
          <tr>${words.columns.map((name) => html`<th key=${name} scope="col">${name}</th>`)}</tr>
        </thead>
        <tbody>
          ${report.rows.map(
            (row) =>
              html`<tr key=${row.kind}>
                <th scope="row">${row.name}</th>
                <td>${row.texts}</td>
                <td>${row.identical}</td>
                <td>${row.near_ties}</td>
                <td>${row.failed}</td>
                <td>${words.accepted(row)}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <details>
      <summary>${words.noise}</summary>
      <p class="quiet">${words.noiseAbout}</p>
      <ul class="plain-list">
        ${Object.entries(report.widths).map(([width, value]) => html`<li key=${width}>${words.width(width, value)}</li>`)}
        <li>${words.trees(report.trees)}</li>
      </ul>
    </details>
    <p class="quiet">${words.measured(entry)}</p>
  </article>`;
}

function Running({ check }) {
  return html`<div class="model-progress" role="group" aria-label=${words.running}>
    <progress max="1" value=${check.fraction} aria-label=${words.running}></progress>
    <span class="quiet">${words.stage(check)}</span>
    <button type="button" class="button small" onClick=${() => attempt(cancelCheck)}>${strings.common.cancel}</button>
  </div>`;
}

/** The page of the exactness report. */
export function ExactnessPage() {
  const standard = useStore((state) => state.defaultModel ?? state.models[0]?.id);
  const [chosen, setChosen] = useState(null);
  const [limit, setLimit] = useState(LIMITS[0]);
  const [got, setGot] = useFollowed(getExactness, { exactness: (value, { check }) => ({ ...value, check }) });
  const model = chosen ?? got?.check?.model ?? standard;
  const check = got?.check;
  const running = check?.state === "running";
  const start = (event) => {
    event.preventDefault();
    attempt(async () => {
      const started = await startCheck({ model, limit });
      setGot({ ...got, check: started.check });
    });
  };
  // A check that has ended has a new report.
  const [asked, setAsked] = useState(null);
  if (check?.state === "done" && asked !== check) {
    setAsked(check);
    attempt(async () => setGot(await getExactness()));
  }
  const entry = got?.reports[model];
  return html`<${ModelPage} current="exactness">
    <p>${words.introduction}</p>
    <form class="model-form" onSubmit=${start}>
      <${ModelSelect} label=${words.model} value=${model} onChange=${setChosen} disabled=${running} />
      <label class="field"
        ><span>${words.thoroughness}</span>
        <select value=${limit} disabled=${running} onChange=${(event) => setLimit(Number(event.target.value))}>
          ${LIMITS.map((value) => html`<option key=${value} value=${value}>${words.limits[value]}</option>`)}
        </select>
      </label>
      <button class="button primary" disabled=${running || !model}>${entry ? words.again : words.start}</button>
    </form>
    ${running && html`<${Running} check=${check} />`}
    <div aria-live="polite">
      ${check?.state === "failed" && html`<p class="fault">${check.error}</p>`}
      ${check?.state === "cancelled" && html`<p class="quiet">${words.cancelled}</p>`}
      ${entry ? html`<${Report} entry=${entry} />` : got && !running && html`<p class="quiet">${words.none}</p>`}
    </div>
  <//>`;
}
