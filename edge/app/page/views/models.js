/** The models on this machine, those worth downloading, and the switcher in a chat's header. */

import { html, useEffect, useState } from "edgerun/preact";

import { Icon } from "../icons.js";
import { attempt, changeConversation, modelOf, onEvent, refreshState, regenerate, useStore } from "../store.js";
import { strings } from "../strings.js";
import { Dialog, IconButton, Menu } from "./dialogs.js";
import { DownloadField, DownloadList, HubSearch, useDownloads } from "./downloads.js";
import { ExportPage } from "./export.js";
import { getRecommended, loadModel, removeModel, startDownload, unloadModel, useFollowed } from "./model_api.js";
import { ModelPage } from "./model_page.js";

const words = strings.models;

function RemoveDialog({ model, onClose }) {
  const remove = () => {
    onClose();
    attempt(async () => {
      await removeModel(model.id);
      await refreshState();
    });
  };
  return html`<${Dialog} title=${words.removeTitle(model.title)} onClose=${onClose} className="dialog-small">
    <p>${words.removeAbout(model)}</p>
    <div class="dialog-actions">
      <button type="button" class="button" data-autofocus onClick=${onClose}>${strings.common.cancel}</button>
      <button type="button" class="button danger-button" onClick=${remove}>${words.remove}</button>
    </div>
  <//>`;
}

function Facts({ facts }) {
  return html`<dl class="model-facts">
    ${facts.map(
      ([name, value, about]) => html`<div key=${name} title=${about}><dt>${name}</dt><dd>${value}</dd></div>`,
    )}
  </dl>`;
}

function Model({ model, loading, onRemove }) {
  const act = (action) => () =>
    attempt(async () => {
      await action(model.id);
      await refreshState();
    });
  const busy = model.loading || loading;
  return html`<li class="model-card" data-model=${model.id}>
    <div class="model-card-head">
      <h3>${model.title}</h3>
      ${model.loaded && html`<span class="model-badge good">${words.loaded}</span>`}
      ${model.bundled && html`<span class="model-badge">${words.bundled}</span>`}
      <span class="model-actions">
        ${busy
          ? html`<span class="quiet" role="status">${words.loading(loading)}</span>`
          : model.loaded
            ? html`<button type="button" class="button small" aria-label=${words.unloadLabel(model.title)} disabled=${model.in_use} title=${model.in_use ? words.inUse : undefined} onClick=${act(unloadModel)}>${words.unload}</button>`
            : html`<button type="button" class="button small" aria-label=${words.loadLabel(model.title)} onClick=${act(loadModel)}>${words.load}</button>`}
        ${model.removable &&
        html`<${IconButton} icon="bin" label=${words.removeLabel(model.title)} disabled=${model.in_use} onClick=${onRemove} />`}
      </span>
    </div>
    ${model.about && html`<p>${model.about}</p>`}
    <${Facts} facts=${words.facts(model)} />
  </li>`;
}

function Recommended({ model, state }) {
  const downloading = state === "downloading" || state === "queued";
  // A download that is in the list already is resumed.
  const download = () => attempt(() => startDownload(model.id));
  return html`<li class="model-card" data-recommended=${model.id}>
    <div class="model-card-head">
      <h3>${model.title}</h3>
      <span class="model-actions">
        ${model.downloaded
          ? html`<span class="model-badge good">${words.here}</span>`
          : html`<button
              type="button"
              class=${model.fits ? "button small primary" : "button small"}
              aria-label=${state && !downloading ? words.resumeLabel(model.title) : words.downloadLabel(model.title)}
              disabled=${downloading}
              onClick=${download}
            >
              ${downloading ? words.downloading : state ? strings.downloads.resume : words.download(model.disk_bytes)}
            </button>`}
      </span>
    </div>
    <p><strong>${model.good_for}.</strong> ${model.why}</p>
    <p class=${model.fits ? "model-reason" : "model-reason poor"}>${model.reason}</p>
    <p class="quiet">${words.about(model)}</p>
  </li>`;
}

function RecommendedList({ downloads }) {
  const [got] = useFollowed(getRecommended, {});
  const models = useStore((state) => state.models);
  if (!got) return html`<p class="quiet" role="status">${strings.chat.loading}</p>`;
  const here = new Set(models.map((model) => model.id.split(":")[0]));
  const under = new Map((downloads ?? []).filter((each) => each.state !== "done").map((each) => [each.id, each.state]));
  const shown = got.recommended.map((model) => ({ ...model, downloaded: here.has(model.repo) }));
  const card = (model) => html`<${Recommended} key=${model.id} model=${model} state=${under.get(model.id)} />`;
  const [fitting, others] = [shown.filter((model) => model.fits), shown.filter((model) => !model.fits)];
  return html`<section aria-labelledby="recommended-title">
    <h2 id="recommended-title">${words.recommended}</h2>
    <p class="quiet">${words.recommendedAbout(got.free_bytes)}</p>
    <${DownloadField} />
    <${HubSearch} downloads=${downloads} />
    <ul class="model-list">${fitting.slice(0, 5).map(card)}</ul>
    ${(fitting.length > 5 || others.length > 0) &&
    html`<details class="model-more">
      <summary>${words.more(fitting.slice(5).length, others.length)}</summary>
      <ul class="model-list">${[...fitting.slice(5), ...others].map(card)}</ul>
    </details>`}
  </section>`;
}

/** The page of the models: what is here, what is being downloaded, and what is worth downloading. */
export function ModelsPage() {
  const tab = useStore(() => location.hash.split("/")[2]);
  return tab === "export" ? html`<${ExportPage} />` : html`<${OwnModels} />`;
}

function OwnModels() {
  const models = [...useStore((state) => state.models), ...useStore((state) => state.encoders)];
  const loaded = useStore((state) => state.loaded);
  const [removing, setRemoving] = useState(null);
  const [loading, setLoading] = useState({});
  const downloads = useDownloads();
  useEffect(
    () => onEvent("models", (event) => setLoading(event.loading ? { [event.loading]: event } : {})),
    [],
  );
  return html`<${ModelPage} current="models">
    <section aria-labelledby="models-title">
      <h2 id="models-title">${words.onThisMachine}</h2>
      ${!loaded && html`<p class="quiet" role="status">${strings.chat.loading}</p>`}
      <ul class="model-list">
        ${models.map(
          (model) =>
            html`<${Model} key=${model.id} model=${model} loading=${loading[model.id]} onRemove=${() => setRemoving(model)} />`,
        )}
      </ul>
    </section>
    <${DownloadList} downloads=${downloads} />
    <${RecommendedList} downloads=${downloads} />
    ${removing && html`<${RemoveDialog} model=${removing} onClose=${() => setRemoving(null)} />`}
  <//>`;
}

/** Asks for the model that writes another answer beside one. */
export function RegenerateDialog({ message, onClose }) {
  const models = useStore((state) => state.models.filter((model) => model.id !== message.model));
  const choose = (model) => {
    onClose();
    attempt(() => regenerate(message, 1, model.id));
  };
  return html`<${Dialog} title=${strings.message.anotherModelTitle} onClose=${onClose} className="dialog-small">
    <ul class="model-list">
      ${models.map(
        (model) =>
          html`<li key=${model.id}>
            <button type="button" class="button model-choice" onClick=${() => choose(model)}>
              <span>${model.title}</span><small class="quiet">${words.brief(model)}</small>
            </button>
          </li>`,
      )}
    </ul>
  <//>`;
}

/**
 * The name of a conversation's model in its header, which opens a menu of all models with what they need.
 *
 * @param {object} props
 * @param {object|undefined} props.conversation undefined for one that has not been created yet
 */
export function ModelSwitcher({ conversation }) {
  const models = useStore((state) => state.models);
  const current = useStore(() => modelOf(conversation));
  const name = current?.title ?? conversation?.model ?? words.none;
  const items = () => [
    ...models.map((model) => ({
      icon: model.id === current?.id ? "check" : "model",
      checked: model.id === current?.id,
      label: html`${model.title}${model.loaded && html` <span class="model-badge good">${words.loaded}</span>`}
        <small class="quiet">${words.brief(model)}</small>`,
      run: () => attempt(() => changeConversation(conversation?.id ?? null, { model: model.id })),
    })),
    { icon: "plus", label: words.getMore, href: "#/models" },
  ];
  return html`<${Menu} label=${words.switcherLabel(name)} items=${items} className="model-switcher">
    <span>${name}</span><${Icon} name="right" />
  <//>`;
}
