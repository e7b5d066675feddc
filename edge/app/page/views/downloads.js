/** Downloads from the hub: their list, and the field that begins another one. */

import { html, useEffect, useState } from "edgerun/preact";

import { attempt, useStore } from "../store.js";
import { strings } from "../strings.js";
import { IconButton } from "./dialogs.js";
import { changeDownload, getDownloads, replaced, searchHub, startDownload, useFollowed } from "./model_api.js";

const words = strings.downloads;

/** The downloads, kept up to date; null before they are known. */
export function useDownloads() {
  const [got] = useFollowed(getDownloads, {
    download: (value, { download }) => ({ downloads: replaced(value.downloads, download) }),
  });
  return got?.downloads ?? null;
}

const STALLED_MS = 4000;

/** Whether a download has not said anything for some seconds. */
function useStalled(download) {
  const [stalled, setStalled] = useState(false);
  useEffect(() => {
    setStalled(false);
    if (download.state !== "downloading") return undefined;
    const timer = setTimeout(() => setStalled(true), STALLED_MS);
    return () => clearTimeout(timer);
  }, [download]);
  return stalled;
}

function Progress({ download }) {
  const { received, total, state } = download;
  const stalled = useStalled(download);
  const known = total > 0;
  const label = words.progressOf(download.id);
  return html`<div class="model-progress">
    ${known
      ? html`<progress max=${total} value=${received} aria-label=${label}></progress>`
      : html`<progress aria-label=${label} max="1" value=${state === "downloading" ? undefined : 0}></progress>`}
    <span class="quiet">${words.amount(stalled ? { ...download, bytes_per_second: null, seconds_left: null } : download)}</span>
    ${stalled && html`<span class="quiet">${words.stalled}</span>`}
  </div>`;
}

function Download({ download }) {
  const change = (name) => () => attempt(() => changeDownload(download.key, name));
  const moving = download.state === "downloading" || download.state === "queued";
  return html`<li class="model-card" data-download=${download.id} data-state=${download.state}>
    <div class="model-card-head">
      <h3>${download.id}</h3>
      <span class="model-badge">${words.states[download.state]}</span>
      <span class="model-actions">
        ${moving && html`<button type="button" class="button small" onClick=${change("pause")}>${words.pause}</button>`}
        ${(download.state === "paused" || download.state === "failed") &&
        html`<button type="button" class="button small" onClick=${change("resume")}>${words.resume}</button>`}
        ${download.state === "done"
          ? html`<${IconButton} icon="close" label=${words.dismiss(download.id)} onClick=${change("cancel")} />`
          : html`<button type="button" class="button small danger-text" onClick=${change("cancel")}>${words.cancel}</button>`}
      </span>
    </div>
    ${download.state !== "done" && html`<${Progress} download=${download} />`}
    ${download.error && html`<p class="fault" role="alert">${download.error}</p>`}
  </li>`;
}

/** All downloads; nothing where there are none. */
export function DownloadList({ downloads }) {
  if (!downloads?.length) return null;
  return html`<section aria-labelledby="downloads-title">
    <h2 id="downloads-title">${words.title}</h2>
    <ul class="model-list">
      ${downloads.map((download) => html`<${Download} key=${download.key} download=${download} />`)}
    </ul>
  </section>`;
}

function Found({ model, here, state }) {
  const under = state === "downloading" || state === "queued";
  return html`<li class="model-card" data-found=${model.repo}>
    <div class="model-card-head">
      <h3>${model.repo}</h3>
      <span class="model-actions">
        ${here
          ? html`<span class="model-badge good">${strings.models.here}</span>`
          : html`<button type="button" class="button small" aria-label=${strings.models.downloadLabel(model.repo)} disabled=${under} onClick=${() => attempt(() => startDownload(model.repo))}>
              ${under ? strings.models.downloading : words.download}
            </button>`}
      </span>
    </div>
    <p class="quiet">${words.found(model)}</p>
  </li>`;
}

/** A field for a part of a model's name. The hub is asked when the form is sent, and at no other time. */
export function HubSearch({ downloads }) {
  const [name, setName] = useState("");
  const [found, setFound] = useState(null);
  const [busy, setBusy] = useState(false);
  const here = useStore((state) => state.models.map((model) => model.id.split(":")[0]));
  const submit = async (event) => {
    event.preventDefault();
    if (!name.trim() || busy) return;
    setBusy(true);
    setFound((await attempt(() => searchHub(name.trim())))?.found ?? null);
    setBusy(false);
  };
  return html`<form class="model-form" role="search" onSubmit=${submit}>
      <label class="field"
        ><span>${words.search}</span>
        <input
          name="model-name"
          value=${name}
          placeholder=${words.searchExample}
          autocomplete="off"
          spellcheck=${false}
          aria-describedby="search-about"
          onInput=${(event) => setName(event.target.value)}
        />
      </label>
      <button class="button" disabled=${!name.trim() || busy}>${busy ? words.searching : words.searchButton}</button>
      <p class="quiet" id="search-about" role="status">${found ? words.foundCount(found.length) : words.searchAbout}</p>
    </form>
    ${found?.length > 0 &&
    html`<ul class="model-list" aria-label=${words.results}>
      ${found.map(
        (model) =>
          html`<${Found}
            key=${model.repo}
            model=${model}
            here=${here.includes(model.repo)}
            state=${downloads?.find((each) => each.id === model.repo)?.state}
          />`,
      )}
    </ul>`}`;
}

/** A field for the id of any model on the hub. */
export function DownloadField() {
  const [id, setId] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    if (!id.trim()) return;
    if (await attempt(() => startDownload(id.trim()))) setId("");
  };
  return html`<form class="model-form" onSubmit=${submit}>
    <label class="field"
      ><span>${words.another}</span>
      <input
        name="model-id"
        value=${id}
        placeholder="org/name:variant"
        autocomplete="off"
        spellcheck=${false}
        aria-describedby="another-about"
        onInput=${(event) => setId(event.target.value)}
      />
    </label>
    <button class="button" disabled=${!id.trim()}>${words.download}</button>
    <p class="quiet" id="another-about">${words.anotherAbout}</p>
  </form>`;
}
