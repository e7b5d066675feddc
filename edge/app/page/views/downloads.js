/** Downloads from the hub: their list, and the field that begins another one. */

import { html, useEffect, useState } from "edgerun/preact";

import { attempt } from "../store.js";
import { strings } from "../strings.js";
import { IconButton } from "./dialogs.js";
import { changeDownload, getDownloads, replaced, startDownload, useFollowed } from "./model_api.js";

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
