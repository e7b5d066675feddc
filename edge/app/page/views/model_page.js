/** What the pages about models have in common: their frame, and the choice of a model. */

import { html } from "edgerun/preact";

import { Icon } from "../icons.js";
import { set, useStore } from "../store.js";
import { strings } from "../strings.js";
import { IconButton, Menu } from "./dialogs.js";

const words = strings.models;
const TABS = ["models", "export"];
const ADVANCED = ["compare", "exactness"];
const ADDRESSES = { models: "#/models", export: "#/models/export", compare: "#/compare", exactness: "#/exactness" };

/**
 * The frame of the pages about models: their header, and links to one another, of which those for experts are in a menu.
 *
 * @param {object} props
 * @param {"models"|"export"|"compare"|"exactness"} props.current
 */
export function ModelPage({ current, children }) {
  return html`<main class="page">
    <header class="chat-header">
      <${IconButton} icon="menu" className="drawer-open" label=${strings.sidebar.show} onClick=${() => set({ drawer: true })} />
      <h1 tabindex="-1">${words.pages[current]}</h1>
    </header>
    <nav class="model-tabs" aria-label=${words.pagesLabel}>
      ${TABS.map(
        (tab) => html`<a key=${tab} href=${ADDRESSES[tab]} aria-current=${tab === current ? "page" : undefined}>${words.tabs[tab]}</a>`,
      )}
      <${Menu}
        label=${words.advanced}
        className="model-advanced"
        aria-current=${ADVANCED.includes(current) ? "true" : undefined}
        items=${() => ADVANCED.map((tab) => ({ label: words.tabs[tab], href: ADDRESSES[tab] }))}
      >
        ${words.advanced}<${Icon} name="right" />
      <//>
    </nav>
    <div class="scroller">
      <div class="column model-page">${children}</div>
    </div>
  </main>`;
}

/** A choice among the models; `label` is above it. */
export function ModelSelect({ label, value, onChange, disabled = false }) {
  const models = useStore((state) => state.models);
  return html`<label class="field"
    ><span>${label}</span>
    <select value=${value} disabled=${disabled} onChange=${(event) => onChange(event.target.value)}>
      ${models.map((model) => html`<option key=${model.id} value=${model.id}>${model.title}</option>`)}
    </select>
  </label>`;
}
