/** Search over all conversations. */

import { html, useEffect, useId, useRef, useState } from "edgerun/preact";

import { search } from "../api.js";
import { openConversation, reportError } from "../store.js";
import { strings } from "../strings.js";
import { Dialog } from "./dialogs.js";

const DELAY = 120;

/** The snippet with the words of the query marked. */
function Snippet({ text, query }) {
  const words = query.trim().split(/\s+/).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const pattern = new RegExp(`(${words.join("|")})`, "giu");
  return text.split(pattern).map((part, index) => (index % 2 ? html`<mark>${part}</mark>` : part));
}

/** A dialog with a line to type in and what it finds, chosen by arrows and Enter or by a click. */
export function SearchDialog({ onClose }) {
  const [query, setQuery] = useState("");
  const [hits, setHits] = useState(null);
  const [found, setFound] = useState("");
  const [at, setAt] = useState(0);
  const list = useId();
  const box = useRef(null);
  useEffect(() => {
    if (!query.trim()) {
      setHits(null);
      return undefined;
    }
    const abort = new AbortController();
    const timer = setTimeout(() => {
      search(query, abort.signal).then((got) => {
        setHits(got.hits);
        setFound(query);
        setAt(0);
      }, reportError);
    }, DELAY);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [query]);
  useEffect(() => box.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" }), [at]);
  const open = (hit) => {
    onClose();
    openConversation(hit.conversation, hit.message);
  };
  const press = (event) => {
    if (event.isComposing || !hits?.length) return;
    if (event.key === "ArrowDown") setAt((at + 1) % hits.length);
    else if (event.key === "ArrowUp") setAt((at + hits.length - 1) % hits.length);
    else if (event.key === "Enter") open(hits[at]);
    else return;
    event.preventDefault();
  };
  const option = (index) => `${list}-${index}`;
  return html`<${Dialog} title=${strings.search.title} onClose=${onClose} className="search-dialog">
    <input
      data-autofocus
      role="combobox"
      aria-expanded=${!!hits?.length}
      aria-controls=${list}
      aria-autocomplete="list"
      aria-activedescendant=${hits?.length ? option(at) : undefined}
      aria-label=${strings.search.label}
      placeholder=${strings.search.placeholder}
      value=${query}
      onInput=${(event) => setQuery(event.target.value)}
      onKeyDown=${press}
    />
    <p class="quiet" role="status">${hits ? strings.search.found(hits.length) : strings.search.hint}</p>
    <ul class="hits" id=${list} role="listbox" aria-label=${strings.search.results} ref=${box}>
      ${(hits ?? []).map(
        (hit, index) =>
          html`<li
            key=${`${hit.conversation} ${hit.message}`}
            id=${option(index)}
            role="option"
            aria-selected=${index === at}
            onMouseMove=${() => index !== at && setAt(index)}
            onClick=${() => open(hit)}
          >
            <strong>${hit.title || strings.sidebar.untitled}</strong>
            <span><${Snippet} text=${hit.snippet} query=${found} /></span>
          </li>`,
      )}
    </ul>
  <//>`;
}
