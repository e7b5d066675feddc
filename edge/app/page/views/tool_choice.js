/** Tools of a conversation: which ones its answers may call, and which of them without asking. */

import { html, useEffect, useState } from "edgerun/preact";

import { getTools } from "../api.js";
import { attempt, onEvent } from "../store.js";
import { strings } from "../strings.js";

const words = strings.tools;

/** The MCP servers, kept up to date; null before they are known. Asking for them starts those that are on. */
export function useToolServers() {
  const [got, setGot] = useState(null);
  const fetchTools = () =>
    attempt(async () => {
      setGot(await getTools());
    });
  useEffect(() => {
    fetchTools();
    return onEvent("tools", fetchTools);
  }, []);
  return [got, setGot];
}

/**
 * A part of the dialog of a conversation.
 *
 * @param {object} props
 * @param {string[]} props.chosen ids of tools
 * @param {string[]} props.allowed those that are called without asking
 * @param {(chosen: string[], allowed: string[]) => void} props.onChange
 */
export function ToolChoice({ chosen, allowed, onChange }) {
  const [got] = useToolServers();
  if (!got) return html`<fieldset><legend>${words.title}</legend><p class="quiet">${strings.chat.loading}</p></fieldset>`;
  const listed = got.servers.filter((server) => server.enabled);
  const here = new Set(listed.flatMap((server) => server.tools.map((tool) => tool.id)));
  const gone = chosen.filter((id) => !here.has(id));
  const choose = (id, on) =>
    onChange(on ? [...chosen, id] : chosen.filter((other) => other !== id), on ? allowed : allowed.filter((other) => other !== id));
  const ask = (id) => onChange(chosen, allowed.filter((other) => other !== id));
  const tool = (id, name, about) =>
    html`<div class="tool-row" key=${id}>
      <label class="switch"
        ><input type="checkbox" checked=${chosen.includes(id)} onChange=${(event) => choose(id, event.target.checked)} />
        <span>${name}${about && html`<small class="quiet">${about}</small>`}</span></label
      >
      ${allowed.includes(id) &&
      html`<span class="quiet">${words.allowed}</span>
        <button type="button" class="button small" aria-label=${words.askAgainLabel(name)} onClick=${() => ask(id)}>${words.askAgain}</button>`}
    </div>`;
  return html`<fieldset class="tools">
    <legend>${words.title}</legend>
    <p class="quiet">${listed.length ? words.choiceAbout : words.noServers} <a href="#/settings">${words.toSettings}</a></p>
    ${listed.map(
      (server) =>
        html`<div class="tool-group" key=${server.name} role="group" aria-label=${server.name}>
          <p class="tool-server">${server.name}${server.state === "starting" && html` <span class="quiet">${words.states.starting}</span>`}</p>
          ${server.error && html`<p class="fault">${server.error}</p>`}
          ${server.tools.map(({ id, name, description }) => tool(id, name, description.split("\n")[0]))}
        </div>`,
    )}
    ${gone.map((id) => tool(id, id, words.gone))}
  </fieldset>`;
}
