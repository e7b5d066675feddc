/** The MCP servers in the settings: a list with their states, and a form for one of them. */

import { html, useState } from "edgerun/preact";

import { removeToolServer, saveToolServer } from "../api.js";
import { attempt } from "../store.js";
import { strings } from "../strings.js";
import { Dialog } from "./dialogs.js";
import { useToolServers } from "./tool_choice.js";
import { ConfigurationForm, fieldsOf, linesOf } from "./tool_configuration.js";

const words = strings.tools;

/** Lines of `NAME=value` as an object, or null where one has no name. */
function variablesOf(text) {
  const pairs = text.split("\n").filter((line) => line.trim()).map((line) => [line.indexOf("="), line]);
  if (pairs.some(([at]) => at < 1)) return null;
  return Object.fromEntries(pairs.map(([at, line]) => [line.slice(0, at).trim(), line.slice(at + 1)]));
}

function ServerForm({ server, onSaved, onClose }) {
  const [name, setName] = useState(server?.name ?? "");
  const [command, setCommand] = useState(server?.url || (server?.command ?? ""));
  const [given, setGiven] = useState((server?.arguments ?? []).join("\n"));
  const [variables, setVariables] = useState(linesOf(server ?? {}).join("\n"));
  const named = variablesOf(variables);
  const remote = /^https?:/i.test(command.trim());
  const save = async (event) => {
    event.preventDefault();
    if (!named) return;
    const fields = remote
      ? { url: command.trim(), headers: named }
      : { command: command.trim(), arguments: given.split("\n").filter((line) => line), environment: named };
    const got = await attempt(() => saveToolServer(name.trim(), fields));
    if (got) {
      onSaved(got);
      onClose();
    }
  };
  return html`<${Dialog} title=${server ? words.editTitle(server.name) : words.add} onClose=${onClose}>
    <form class="stack" onSubmit=${save}>
      <p class="warning-line">${words.trust}</p>
      <label class="field"
        ><span>${words.name}</span>
        <input data-autofocus required value=${name} readonly=${Boolean(server)} maxlength="40" pattern="[A-Za-z0-9_\\-]+" autocomplete="off" onInput=${(event) => setName(event.target.value)} />
        <small class="quiet">${words.nameAbout}</small>
      </label>
      <label class="field"
        ><span>${words.command}</span>
        <input required value=${command} autocomplete="off" spellcheck=${false} placeholder="uvx" onInput=${(event) => setCommand(event.target.value)} />
        <small class="quiet">${words.commandAbout}</small>
      </label>
      ${!remote &&
      html`<label class="field"
        ><span>${words.arguments}</span>
        <textarea rows="3" spellcheck=${false} value=${given} onInput=${(event) => setGiven(event.target.value)}></textarea>
        <small class="quiet">${words.argumentsAbout}</small>
      </label>`}
      <label class="field"
        ><span>${remote ? words.headers : words.environment}</span>
        <textarea rows="2" spellcheck=${false} value=${variables} aria-invalid=${named === null} onInput=${(event) => setVariables(event.target.value)}></textarea>
        <small class=${named ? "quiet" : "fault"}>${named ? words.environmentAbout : words.notVariables}</small>
      </label>
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${onClose}>${strings.common.cancel}</button>
        <button class="button primary">${words.save}</button>
      </div>
    </form>
  <//>`;
}

function Server({ server, onChange, onEdit }) {
  const change = (action) => () => attempt(async () => onChange(await action()));
  const save = (enabled) => change(() => saveToolServer(server.name, { ...fieldsOf(server), enabled }));
  return html`<li class="tool-card" data-server=${server.name} data-state=${server.state}>
    <div class="tool-card-head">
      <h3>${server.name}</h3>
      <span class="call-state">${words.states[server.state]}</span>
      <span class="button-row">
        ${server.state === "failed" && html`<button type="button" class="button small" onClick=${save(true)}>${words.again}</button>`}
        <button type="button" class="button small" aria-label=${words.toggleLabel(server)} onClick=${save(!server.enabled)}>
          ${server.enabled ? words.turnOff : words.turnOn}
        </button>
        <button type="button" class="button small" aria-label=${words.editLabel(server.name)} onClick=${() => onEdit(server)}>${words.edit}</button>
        <button type="button" class="button small danger-text" aria-label=${words.removeLabel(server.name)} onClick=${change(() => removeToolServer(server.name))}>
          ${words.remove}
        </button>
      </span>
    </div>
    <p class="quiet tool-command">${server.url || [server.command, ...server.arguments].join(" ")}</p>
    ${server.error && html`<p class="fault" role="alert">${server.error}</p>`}
    ${server.tools.length > 0 && html`<p>${words.offers(server.tools.map((tool) => tool.name))}</p>`}
  </li>`;
}

/** A section of the settings. */
export function ToolServers() {
  const [got, setGot] = useToolServers();
  const [edited, setEdited] = useState(undefined);
  const [pasting, setPasting] = useState(false);
  return html`<section aria-labelledby="tools-title">
    <h2 id="tools-title">${words.servers}</h2>
    <p class="quiet">${words.serversAbout}</p>
    ${got?.problem && html`<p class="fault" role="alert">${got.problem}</p>`}
    ${got?.servers.length > 0 &&
    html`<ul class="tool-list">
      ${got.servers.map((server) => html`<${Server} key=${server.name} server=${server} onChange=${setGot} onEdit=${setEdited} />`)}
    </ul>`}
    <p class="button-row">
      <button type="button" class="button" onClick=${() => setEdited(null)}>${words.add}</button>
      <button type="button" class="button" onClick=${() => setPasting(true)}>${words.paste}</button>
    </p>
    ${pasting &&
    html`<${ConfigurationForm} known=${(got?.servers ?? []).map((server) => server.name)} onSaved=${setGot} onClose=${() => setPasting(false)} />`}
    ${edited !== undefined &&
    html`<${ServerForm} server=${edited} onSaved=${setGot} onClose=${() => setEdited(undefined)} />`}
  </section>`;
}
