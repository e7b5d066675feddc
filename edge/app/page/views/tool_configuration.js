/** Adds MCP servers from the JSON that other programs keep them in, each shown before it is added. */

import { html, useEffect, useState } from "edgerun/preact";

import { readToolServers, saveToolServer } from "../api.js";
import { attempt, reportError } from "../store.js";
import { strings } from "../strings.js";
import { Dialog } from "./dialogs.js";

const words = strings.tools;

/** What is saved of a server that is listed, or was found in a configuration. */
export const fieldsOf = ({ command, arguments: given, environment, url, headers, enabled }) =>
  ({ command, arguments: given, environment, url, headers, enabled });

/** Variables of a server, or headers of one with an address, as lines. */
export const linesOf = ({ environment, headers }) =>
  Object.entries({ ...environment, ...headers }).map(([name, value]) => `${name}=${value}`);

const DELAY = 200;

const NOTHING = { servers: [], problem: null };

/** The servers in a text, and what is wrong with it, as soon as nothing more is typed. */
function useConfiguration(text) {
  const [read, setRead] = useState(NOTHING);
  useEffect(() => {
    setRead(NOTHING);
    if (!text.trim()) return undefined;
    const abort = new AbortController();
    const timer = setTimeout(() => {
      readToolServers(text, abort.signal).then(setRead, reportError);
    }, DELAY);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [text]);
  return read;
}

function Found({ server, replaces, chosen, onChoose }) {
  const parts = [server.command, ...server.arguments].map((part) => (/\s/.test(part) ? JSON.stringify(part) : part));
  return html`<li class="tool-card" data-found=${server.name}>
    <label class="tool-row">
      <input type="checkbox" checked=${chosen} disabled=${server.problem !== null} onChange=${(event) => onChoose(event.target.checked)} />
      <span class="tool-server">${server.name}</span>
    </label>
    ${(server.url || server.command) && html`<p class="tool-command">${server.url || parts.join(" ")}</p>`}
    ${linesOf(server).map((line) => html`<p class="tool-command quiet" key=${line}>${line}</p>`)}
    ${server.problem && html`<p class="fault">${server.problem}</p>`}
    ${!server.problem && replaces && html`<p class="quiet">${words.replaces}</p>`}
    ${!server.problem && !server.enabled && html`<p class="quiet">${words.pasteStopped}</p>`}
    ${!server.problem && server.ignored.length > 0 && html`<p class="quiet">${words.ignored(server.ignored)}</p>`}
  </li>`;
}

/**
 * A dialog with a field for the configuration and what is in it. Servers are added, and started, by its button alone.
 *
 * @param {object} props
 * @param {string[]} props.known names of the servers that are listed already
 */
export function ConfigurationForm({ known, onSaved, onClose }) {
  const [text, setText] = useState("");
  const [left, setLeft] = useState([]);
  const { servers, problem: fault } = useConfiguration(text);
  const chosen = servers.filter(({ name, problem }) => problem === null && !left.includes(name));
  const save = (event) => {
    event.preventDefault();
    attempt(async () => {
      for (const server of chosen) onSaved(await saveToolServer(server.name, fieldsOf(server)));
      onClose();
    });
  };
  const choose = (name) => (taken) => setLeft(taken ? left.filter((other) => other !== name) : [...left, name]);
  return html`<${Dialog} title=${words.paste} onClose=${onClose}>
    <form class="stack" onSubmit=${save}>
      <label class="field"
        ><span>${words.pasteLabel}</span>
        <textarea
          data-autofocus
          rows="5"
          spellcheck=${false}
          value=${text}
          placeholder=${'{ "mcpServers": { … } }'}
          aria-invalid=${fault !== null}
          aria-describedby="configuration-about"
          onInput=${(event) => setText(event.target.value)}
        ></textarea>
      </label>
      <p id="configuration-about" class=${fault ? "fault" : "quiet"} role="status">${fault ?? words.pasteAbout}</p>
      ${servers.length > 0 &&
      html`<p class="warning-line">${words.trust}</p>
        <ul class="tool-list" aria-label=${words.pasteFound}>
          ${servers.map(
            (server) =>
              html`<${Found}
                key=${server.name}
                server=${server}
                replaces=${known.includes(server.name)}
                chosen=${chosen.includes(server)}
                onChoose=${choose(server.name)}
              />`,
          )}
        </ul>`}
      <div class="dialog-actions sticky">
        <button type="button" class="button" onClick=${onClose}>${strings.common.cancel}</button>
        <button class="button primary" disabled=${chosen.length === 0}>${words.pasteAdd(chosen.length)}</button>
      </div>
    </form>
  <//>`;
}
