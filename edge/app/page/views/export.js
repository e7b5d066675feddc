/** Exports of checkpoints: the form, the jobs, and the slider between size and quality. */

import { html, useState } from "edgerun/preact";

import { attempt } from "../store.js";
import { strings } from "../strings.js";
import { cancelExport, choosePlan, getExports, replaced, startExport, useFollowed } from "./model_api.js";
import { ModelPage } from "./model_page.js";

const words = strings.exports;
const WIDTH = 640;
const HEIGHT = 220;
const LEFT = 76;
const TOP = 30;
const BOTTOM = 30;
const FLOOR = 1e-4;

/** Places of plans in the drawing: bytes to the right, the logarithm of their KL upwards. */
function places(plans) {
  const sizes = plans.map((plan) => plan.bytes_read);
  const kls = plans.map((plan) => Math.log10(Math.max(plan.kl, FLOOR)));
  const [smallest, largest] = [Math.min(...sizes), Math.max(...sizes)];
  const [lowest, highest] = [Math.floor(Math.min(...kls)), Math.ceil(Math.max(...kls))];
  const x = (size) => LEFT + ((size - smallest) / (largest - smallest || 1)) * (WIDTH - LEFT - 20) + 6;
  const y = (kl) => TOP + ((highest - kl) / (highest - lowest || 1)) * (HEIGHT - BOTTOM - TOP - 8);
  const points = plans.map((plan, index) => [x(sizes[index]), y(kls[index])]);
  const lines = [];
  for (let power = lowest; power <= highest; power += 1) lines.push([power, y(power)]);
  return { points, lines };
}

function Curve({ plans, chosen, onChoose }) {
  const { points, lines } = places(plans);
  const path = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  return html`<svg class="plan-curve" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${words.curve}>
    ${lines.map(
      ([power, y]) =>
        html`<g key=${power}><line class="grid" x1=${LEFT} x2=${WIDTH} y1=${y} y2=${y} /><text x=${LEFT - 8} y=${y + 4} text-anchor="end">${words.kl(10 ** power)}</text></g>`,
    )}
    <polyline points=${path} />
    ${points.map(
      ([x, y], index) =>
        html`<circle key=${index} class=${index === chosen ? "chosen" : ""} cx=${x} cy=${y} r=${index === chosen ? 8 : 5} onClick=${() => onChoose(index)} />`,
    )}
    <text x=${LEFT} y=${HEIGHT - 6}>${words.smaller}</text>
    <text x=${WIDTH - 4} y=${HEIGHT - 6} text-anchor="end">${words.larger}</text>
    <text x="0" y="16">${words.axis}</text>
  </svg>`;
}

function middle(plans) {
  // The smallest plan that is close to the original, or else the most exact one.
  const close = plans.findIndex((plan) => plan.kl < 0.05);
  return close < 0 ? plans.length - 1 : close;
}

function PlanSlider({ job }) {
  const { plans } = job;
  const [at, setAt] = useState(() => middle(plans));
  const plan = plans[at];
  const id = `plan-${job.key}`;
  return html`<div class="plan-choice">
    <${Curve} plans=${plans} chosen=${at} onChoose=${setAt} />
    <label class="field" for=${id}><span>${words.slider}</span></label>
    <input
      id=${id}
      class="plan-slider"
      type="range"
      min="0"
      max=${plans.length - 1}
      step="1"
      value=${at}
      aria-valuetext=${words.planText(plan)}
      onInput=${(event) => setAt(Number(event.target.value))}
    />
    <div class="plan-ends quiet" aria-hidden="true"><span>${words.smaller}</span><span>${words.better}</span></div>
    <p class="plan-text"><strong>${words.planSize(plan)}</strong> ${words.planQuality(plan)}</p>
    <p class="quiet">${words.planAbout(plan, plans)}</p>
    <p class="button-row">
      <button type="button" class="button primary" onClick=${() => attempt(() => choosePlan(job.key, at))}>${words.exportPlan}</button>
    </p>
  </div>`;
}

function Job({ job }) {
  const working = job.state === "measuring" || job.state === "exporting";
  const ended = job.state === "done" || job.state === "failed" || job.state === "cancelled";
  return html`<li class="model-card" data-export=${job.name} data-state=${job.state}>
    <div class="model-card-head">
      <h3>${job.name}</h3>
      <span class=${job.state === "done" ? "model-badge good" : "model-badge"}>${words.states[job.state]}</span>
      <span class="model-actions">
        <button type="button" class="button small" aria-label=${ended ? words.dismissLabel(job.name) : words.cancelLabel(job.name)} onClick=${() => attempt(() => cancelExport(job.key))}>
          ${ended ? words.dismiss : strings.common.cancel}
        </button>
      </span>
    </div>
    <p class="quiet">${words.jobAbout(job)}</p>
    ${working &&
    html`<div class="model-progress">
      <progress max="1" value=${job.stage ? job.fraction : undefined} aria-label=${words.progressOf(job.name)}></progress>
      <span class="quiet">${words.stage(job.stage)}</span>
    </div>`}
    ${job.state === "choosing" && html`<${PlanSlider} job=${job} />`}
    ${job.state === "done" && html`<p>${words.result(job.result)} <a href="#/models">${words.toModels}</a></p>`}
    ${job.error && html`<p class="fault">${job.error}</p>`}
  </li>`;
}

function Form({ onAdded }) {
  const [source, setSource] = useState("");
  const [name, setName] = useState("");
  const [bits, setBits] = useState("");
  const submit = (event) => {
    event.preventDefault();
    attempt(async () => {
      const got = await startExport({ source, name: name || null, bits: bits ? Number(bits) : null });
      setSource("");
      setName("");
      onAdded(got.job);
    });
  };
  return html`<form class="stack" onSubmit=${submit}>
    <label class="field"
      ><span>${words.source}</span>
      <input name="source" value=${source} placeholder="org/name" spellcheck=${false} autocomplete="off" aria-describedby="source-about" onInput=${(event) => setSource(event.target.value)} />
      <small class="quiet" id="source-about">${words.sourceAbout}</small>
    </label>
    <label class="field"
      ><span>${words.name}</span>
      <input name="name" value=${name} placeholder=${words.nameStandard} maxlength="64" autocomplete="off" onInput=${(event) => setName(event.target.value)} />
    </label>
    <fieldset class="choice">
      <legend>${words.how}</legend>
      ${words.ways.map(
        ([value, label]) =>
          html`<label key=${value}><input type="radio" name="bits" value=${value} checked=${bits === value} onChange=${() => setBits(value)} />${label}</label>`,
      )}
    </fieldset>
    <p class="button-row"><button class="button primary" disabled=${!source.trim()}>${bits ? words.start : words.measure}</button></p>
  </form>`;
}

/** The page of exports. */
export function ExportPage() {
  const [got, setGot] = useFollowed(getExports, {
    export: (value, { job }) => ({ ...value, jobs: replaced(value.jobs, job) }),
  });
  return html`<${ModelPage} current="export">
    <p>${words.introduction}</p>
    ${got?.missing.length > 0 && html`<p class="fault">${words.missing(got.missing[0])} <code>${got.install}</code></p>`}
    ${got && !got.missing.length && html`<${Form} onAdded=${(job) => setGot((old) => ({ ...old, jobs: replaced(old.jobs, job) }))} />`}
    ${got?.jobs.length > 0 &&
    html`<section aria-labelledby="jobs-title">
      <h2 id="jobs-title">${words.jobs}</h2>
      <ul class="model-list">${[...got.jobs].reverse().map((job) => html`<${Job} key=${job.key} job=${job} />`)}</ul>
    </section>`}
    ${got && html`<p class="quiet">${words.folder(got.folder)}</p>`}
  <//>`;
}
