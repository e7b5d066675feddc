/** Settings of the app: look, keys, details of answers, and the conversations as files. */

import { html, useRef } from "edgerun/preact";

import { EXPORT_ALL_URL, changeLogin, getLogin, getUsage, importConversations } from "../api.js";
import { attempt, changeSettings, notify, openConversation, refreshConversations, set, useStore } from "../store.js";
import { strings } from "../strings.js";
import { IconButton } from "./dialogs.js";
import { useFollowed } from "./model_api.js";
import { ToolServers } from "./tool_servers.js";

const LARGEST_IMPORT = 50_000_000;

function Choice({ name, choices, value }) {
  const words = strings.settings[name];
  return html`<fieldset class="choice">
    <legend>${words.label}</legend>
    ${choices.map(
      (choice) =>
        html`<label key=${String(choice)}
          ><input
            type="radio"
            name=${name}
            checked=${value === choice}
            onChange=${() => attempt(() => changeSettings({ [name]: choice }))}
          />${words.choices[choice]}</label
        >`,
    )}
  </fieldset>`;
}

function Switch({ name, value }) {
  const words = strings.settings[name];
  return html`<label class="switch">
    <input
      type="checkbox"
      checked=${value}
      aria-describedby=${`about-${name}`}
      onChange=${(event) => attempt(() => changeSettings({ [name]: event.target.checked }))}
    />
    <span>${words.label}<small class="quiet" id=${`about-${name}`}>${words.about}</small></span>
  </label>`;
}

function Files() {
  const picker = useRef(null);
  const take = async (event) => {
    const chosen = [...event.target.files];
    event.target.value = "";
    for (const file of chosen) {
      if (file.size > LARGEST_IMPORT) {
        notify({ text: strings.composer.tooLarge(file.name, file.size, LARGEST_IMPORT), kind: "error" });
        continue;
      }
      const got = await attempt(async () => importConversations(file.name, await file.text()));
      if (!got) continue;
      await attempt(refreshConversations);
      const count = got.conversations?.length ?? 1;
      const first = got.conversations?.[0];
      notify({
        text: strings.settings.imported(count),
        action: first && { label: strings.settings.open, run: () => openConversation(first.id ?? first) },
      });
    }
  };
  return html`<section>
    <h2>${strings.settings.files}</h2>
    <p class="quiet">${strings.settings.filesAbout}</p>
    <p class="button-row">
      <a class="button" href=${EXPORT_ALL_URL} download>${strings.settings.exportAll}</a>
      <button type="button" class="button" onClick=${() => picker.current.click()}>${strings.settings.import}</button>
      <input ref=${picker} type="file" multiple hidden accept=".json,.md,.markdown,.txt" aria-label=${strings.settings.import} onChange=${take} />
    </p>
  </section>`;
}

/** Whether the app starts at login; what that writes is shown before it is written. */
function Login() {
  const [got, setGot] = useFollowed(getLogin, {});
  const words = strings.settings.login;
  if (!got) return null;
  const change = async (event) => {
    const changed = await attempt(() => changeLogin(event.target.checked));
    setGot(changed ?? { ...got });
  };
  return html`<section>
    <h2>${words.title}</h2>
    <label class="switch">
      <input type="checkbox" checked=${got.enabled} aria-describedby="about-login" onChange=${change} />
      <span>${words.label}<small class="quiet" id="about-login">${words.about}</small></span>
    </label>
    <p class="quiet">${words.files(got.enabled)}</p>
    ${Object.entries(got.files).map(
      ([path, text]) => html`<figure key=${path} class="login-file"><figcaption>${path}</figcaption><pre>${text}</pre></figure>`,
    )}
  </section>`;
}

/** What each model has read and generated. */
function Usage() {
  const [got] = useFollowed(getUsage, {});
  const models = useStore((state) => state.models);
  const words = strings.settings;
  const title = (id) => models.find((model) => model.id === id)?.title ?? id ?? strings.message.model;
  const row = ({ answers, read, generated }) =>
    [answers, read, generated].map((number) => html`<td>${words.usageNumber(number)}</td>`);
  const sum = (name) => got.usage.reduce((total, each) => total + each[name], 0);
  return html`<section>
    <h2>${words.usage}</h2>
    <p class="quiet">${words.usageAbout}</p>
    ${got?.usage.length === 0 && html`<p>${words.usageNone}</p>`}
    ${got?.usage.length > 0 &&
    html`<div class="table-scroller" tabindex="0" role="region" aria-label=${words.usage}>
      <table class="model-table">
        <thead>
          <tr>${words.usageColumns.map((name) => html`<th key=${name} scope="col">${name}</th>`)}</tr>
        </thead>
        <tbody>
          ${got.usage.map((each) => html`<tr key=${each.model}><th scope="row">${title(each.model)}</th>${row(each)}</tr>`)}
        </tbody>
        ${got.usage.length > 1 &&
        html`<tfoot>
          <tr>
            <th scope="row">${words.usageTotal}</th>
            ${row({ answers: sum("answers"), read: sum("read"), generated: sum("generated") })}
          </tr>
        </tfoot>`}
      </table>
    </div>`}
  </section>`;
}

/** The page of the app's settings. Every change holds at once, in all windows. */
export function SettingsPage() {
  const settings = useStore((state) => state.settings);
  const version = useStore((state) => state.version);
  const machine = useStore((state) => state.machine);
  return html`<main class="page">
    <header class="chat-header">
      <${IconButton} icon="menu" className="drawer-open" label=${strings.sidebar.show} onClick=${() => set({ drawer: true })} />
      <h1>${strings.settings.title}</h1>
    </header>
    <div class="scroller">
      <div class="column settings">
        <section>
          <h2>${strings.settings.look}</h2>
          <${Choice} name="theme" choices=${["system", "light", "dark"]} value=${settings.theme} />
          <label class="field range"
            ><span>${strings.settings.font_size.label} <output>${strings.settings.font_size.value(settings.font_size)}</output></span>
            <input
              type="range"
              min="12"
              max="24"
              step="1"
              value=${settings.font_size}
              onInput=${(event) => set({ settings: { ...settings, font_size: Number(event.target.value) } })}
              onChange=${(event) => attempt(() => changeSettings({ font_size: Number(event.target.value) }))}
            />
          </label>
        </section>
        <section>
          <h2>${strings.settings.writing}</h2>
          <${Choice} name="enter_sends" choices=${[true, false]} value=${settings.enter_sends} />
        </section>
        <section>
          <h2>${strings.settings.answers}</h2>
          <${Switch} name="show_statistics" value=${settings.show_statistics} />
          <${Switch} name="token_details" value=${settings.token_details} />
        </section>
        <${Login} />
        <${ToolServers} />
        <${Files} />
        <${Usage} />
        <section>
          <h2>${strings.settings.about}</h2>
          <p>${strings.settings.version(version)}</p>
          <p class="quiet">${strings.settings.machine(machine)}</p>
        </section>
      </div>
    </div>
  </main>`;
}
