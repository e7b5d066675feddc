/** Requests about models, downloads, exports, comparisons and exactness, and what their events tell every page. */

import { useEffect, useState } from "edgerun/preact";

import { request } from "../api.js";
import { notify, onEvent, reportError, useStore } from "../store.js";
import { strings } from "../strings.js";

const at = (key) => encodeURIComponent(key);

export const getModels = () => request("GET", "/api/models");
export const loadModel = (id) => request("POST", "/api/models/load", { id });
export const unloadModel = (id) => request("POST", "/api/models/unload", { id });
export const removeModel = (id) => request("POST", "/api/models/remove", { id });
export const getRecommended = () => request("GET", "/api/models/recommended");

export const searchHub = (words) => request("GET", `/api/models/search?q=${encodeURIComponent(words)}`);

export const getDownloads = () => request("GET", "/api/downloads");
export const startDownload = (id) => request("POST", "/api/downloads", { id });
export const changeDownload = (key, change) => request("POST", `/api/downloads/${at(key)}/${change}`, {});

export const getExports = () => request("GET", "/api/exports");
export const startExport = (fields) => request("POST", "/api/exports", fields);
export const choosePlan = (key, plan) => request("POST", `/api/exports/${at(key)}/choose`, { plan });
export const cancelExport = (key) => request("POST", `/api/exports/${at(key)}/cancel`, {});

export const getComparison = () => request("GET", "/api/comparisons");
export const startComparison = (fields) => request("POST", "/api/comparisons", fields);
export const stopComparison = () => request("POST", "/api/comparisons/stop", {});

export const getExactness = () => request("GET", "/api/exactness");
export const startCheck = (fields) => request("POST", "/api/exactness", fields);
export const cancelCheck = () => request("POST", "/api/exactness/cancel", {});

/**
 * What a request answers, kept up to date: it is sent again whenever the channel of events opens anew.
 *
 * @template T
 * @param {() => Promise<T>} get
 * @param {Record<string, (value: T, event: object) => T>} events how an event of each type changes the value
 * @returns {[T|null, (value: T) => void]} null until the first answer
 */
export function useFollowed(get, events) {
  const [value, setValue] = useState(null);
  const connection = useStore((state) => state.connection);
  useEffect(() => {
    if (connection === "lost") return undefined;
    let shown = true;
    const missed = []; // events that arrive before the answer
    let answered = false;
    const ends = Object.entries(events).map(([type, change]) =>
      onEvent(type, (event) => {
        if (answered) setValue((old) => change(old, event));
        else missed.push([change, event]);
      }),
    );
    get().then((got) => {
      if (!shown) return;
      answered = true;
      setValue(missed.reduce((old, [change, event]) => change(old, event), got));
    }, reportError);
    return () => {
      shown = false;
      for (const end of ends) end();
    };
  }, [connection]);
  return [value, setValue];
}

/** A list in which an item with a key is replaced, added, or taken out where its state says that it was removed. */
export function replaced(items, item) {
  if (item.state === "removed") return items.filter((other) => other.key !== item.key);
  const known = items.some((other) => other.key === item.key);
  return known ? items.map((other) => (other.key === item.key ? item : other)) : [...items, item];
}

const MODELS = "#/models";
const EXPORTS = "#/models/export";
const told = new Map();

function tellOnce(key, state, text, kind) {
  if (told.get(key) === state) return;
  told.set(key, state);
  if (text) notify({ text, kind });
}

// What ends in the background is said on whichever page is shown.
onEvent("download", ({ download }) => {
  const words = strings.downloads;
  if (download.state === "done") tellOnce(download.key, "done", words.arrived(download.model || download.id));
  else if (download.state === "failed")
    tellOnce(download.key, "failed", location.hash !== MODELS && words.hasFailed(download.id, download.error), "error");
  else told.delete(download.key);
});
onEvent("export", ({ job }) => {
  const words = strings.exports;
  if (job.state === "done") tellOnce(job.key, "done", words.finished(job.name));
  else if (job.state === "choosing") tellOnce(job.key, "choosing", location.hash !== EXPORTS && words.measured(job.name));
  else if (job.state === "failed") tellOnce(job.key, "failed", words.hasFailed(job.name, job.error), "error");
  else told.delete(job.key);
});
