/** Keys that work everywhere, and the list of all keys. */

import { html, useLayoutEffect } from "edgerun/preact";

import { answerInProgress, attempt, openConversation, set, state, stopAnswer } from "../store.js";
import { strings } from "../strings.js";
import { Dialog } from "./dialogs.js";

const isMac = /Mac|iP(hone|ad)/.test(navigator.platform);

function typing(event) {
  return event.target.closest?.("input, textarea, select, [contenteditable]") != null;
}

/** Runs what a key stands for; gives whether it stood for something. */
function run(event) {
  const command = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  if (command && !event.altKey && key === "k") set({ dialog: { name: "palette" } });
  else if (command && event.shiftKey && key === "o") openConversation(null);
  else if (command && event.shiftKey && key === "s") set({ dialog: { name: "conversation", id: state.route.id } });
  else if (command && key === ",") location.hash = "#/settings";
  else if (event.key === "Escape") return escape();
  else if (command || event.altKey || typing(event)) return false;
  else if (event.key === "?") set({ dialog: { name: "shortcuts" } });
  else if (event.key === "/") document.querySelector("#composer-text")?.focus();
  else return false;
  return true;
}

function escape() {
  if (document.querySelector("dialog[open], [popover]:popover-open")) return false;
  if (state.drawer) {
    set({ drawer: false });
    return true;
  }
  const { page, id } = state.route;
  if (page !== "chat" || !id || !answerInProgress(id)) return false;
  attempt(() => stopAnswer(id));
  return true;
}

/** Listens to keys for as long as the page lives; from its first frame on, since a reader may press one at once. */
export function useShortcuts() {
  useLayoutEffect(() => {
    const press = (event) => {
      if (event.defaultPrevented || event.isComposing) return;
      if (state.dialog && event.key !== "Escape") return;
      if (run(event)) event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

/** The list of keys. */
export function ShortcutsDialog({ onClose }) {
  const shown = (key) => (isMac ? key.replace("Ctrl", "⌘") : key);
  return html`<${Dialog} title=${strings.shortcuts.title} onClose=${onClose}>
    ${strings.shortcuts.groups.map(
      ([title, keys]) =>
        html`<section key=${title}>
          <h3>${title}</h3>
          <dl class="keys">
            ${keys.map(
              ([key, what]) =>
                html`<div key=${key}>
                  <dt>${shown(key).split(" ").map((part) => html`<kbd>${part}</kbd>`)}</dt>
                  <dd>${what}</dd>
                </div>`,
            )}
          </dl>
        </section>`,
    )}
  <//>`;
}
