/** The command palette: actions, conversations by title, and a search over all messages. */

import { html, useEffect, useId, useMemo, useRef, useState } from "edgerun/preact";

import { search } from "../api.js";
import { Icon } from "../icons.js";
import { attempt, changeSettings, openConversation, reportError, set, showDeleted, state } from "../store.js";
import { strings } from "../strings.js";
import { Dialog } from "./dialogs.js";

const words = strings.palette;
const DELAY = 120;
/** Most conversations that are listed by title. */
const MOST_TITLES = 20;
/** Conversations that are listed before anything is typed. */
const RECENT = 5;

const page = (name) => () => (location.hash = `#/${name}`);

const { pages } = strings.models;
const ACTIONS = [
  ["plus", strings.sidebar.newChat, () => openConversation(null)],
  ["sliders", strings.chat.settings, () => set({ dialog: { name: "conversation", id: state.route.id } })],
  ["model", pages.models, page("models")],
  ["model", pages.export, page("exports")],
  ["model", pages.compare, page("compare")],
  ["model", pages.exactness, page("exactness")],
  ["gear", strings.settings.title, page("settings")],
  ["gear", words.theme, toggleTheme],
  ["bin", words.deleted, () => attempt(() => showDeleted(true)).then(() => set({ drawer: true }))],
  ["keyboard", strings.shortcuts.title, () => set({ dialog: { name: "shortcuts" } })],
];

function toggleTheme() {
  const { theme } = state.settings;
  const dark = theme === "system" ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
  attempt(() => changeSettings({ theme: dark ? "light" : "dark" }));
}

/** A text with the words of the query marked. */
function Marked({ text, query }) {
  const parts = query.trim().split(/\s+/).filter(Boolean).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  if (!parts.length) return text;
  const pattern = new RegExp(`(${parts.join("|")})`, "giu");
  return text.split(pattern).map((part, index) => (index % 2 ? html`<mark>${part}</mark>` : part));
}

/** The actions and conversations whose names have all words of the query. */
function named(query) {
  const parts = query.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (text) => parts.every((part) => text.toLowerCase().includes(part));
  const conversations = [...state.conversations]
    .sort((a, b) => b.updated - a.updated)
    .map(({ id, title }) => ({
      key: id,
      kind: words.conversation,
      title: title || strings.sidebar.untitled,
      run: () => openConversation(id),
    }))
    .filter(({ title }) => matches(title))
    .slice(0, parts.length ? MOST_TITLES : RECENT);
  const actions = ACTIONS.filter(([, title]) => matches(title)).map(([icon, title, run]) => ({
    key: title,
    kind: words.action,
    icon,
    title,
    run,
  }));
  return parts.length ? [...actions, ...conversations] : [...conversations, ...actions];
}

const asEntry = (hit) => ({
  key: hit.message,
  kind: words.message,
  title: hit.title || strings.sidebar.untitled,
  snippet: hit.snippet,
  run: () => openConversation(hit.conversation, hit.message),
});

/** The messages that have all words of the query; null before they are known. */
function useMessages(query) {
  const [found, setFound] = useState({ query: "", messages: null });
  useEffect(() => {
    if (!query.trim()) return undefined;
    const abort = new AbortController();
    const timer = setTimeout(() => {
      search(query, abort.signal).then(({ hits }) => {
        // Titles are found here.
        setFound({ query, messages: hits.filter((hit) => hit.message !== null).map(asEntry) });
      }, reportError);
    }, DELAY);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [query]);
  return found.query === query ? found.messages : null;
}

/** A dialog with a line to type in and what it finds, chosen by arrows and Enter or by a click. */
export function Palette({ onClose }) {
  const [query, setQuery] = useState("");
  const [at, setAt] = useState(0);
  const list = useId();
  const box = useRef(null);
  const messages = useMessages(query);
  const entries = useMemo(() => [...named(query), ...(messages ?? [])], [query, messages]);
  useEffect(() => box.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" }), [at]);
  const choose = (entry) => {
    onClose();
    entry.run();
  };
  const press = (event) => {
    if (event.isComposing || !entries.length) return;
    if (event.key === "ArrowDown") setAt((at + 1) % entries.length);
    else if (event.key === "ArrowUp") setAt((at + entries.length - 1) % entries.length);
    else if (event.key === "Enter") choose(entries[at]);
    else return;
    event.preventDefault();
  };
  const type = (event) => {
    setQuery(event.target.value);
    setAt(0);
  };
  const option = (index) => `${list}-${index}`;
  return html`<${Dialog} title=${words.title} onClose=${onClose} className="palette">
    <input
      data-autofocus
      role="combobox"
      aria-expanded=${entries.length > 0}
      aria-controls=${list}
      aria-autocomplete="list"
      aria-activedescendant=${entries.length ? option(at) : undefined}
      aria-label=${words.label}
      placeholder=${words.placeholder}
      value=${query}
      onInput=${type}
      onKeyDown=${press}
    />
    <p class="quiet" role="status">${messages ? words.found(entries.length) : words.hint}</p>
    <ul class="hits" id=${list} role="listbox" aria-label=${words.results} ref=${box}>
      ${entries.map(
        ({ key, kind, icon, title, snippet, ...entry }, index) =>
          html`<li
            key=${key}
            id=${option(index)}
            role="option"
            aria-selected=${index === at}
            onMouseMove=${() => index !== at && setAt(index)}
            onClick=${() => choose(entry)}
          >
            ${icon && html`<${Icon} name=${icon} />`}
            <strong><${Marked} text=${title} query=${query} /></strong>
            <small class="quiet">${kind}</small>
            ${snippet && html`<span><${Marked} text=${snippet} query=${query} /></span>`}
          </li>`,
      )}
    </ul>
  <//>`;
}
