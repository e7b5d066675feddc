/** A conversation: its header, its messages and the composer. */

import { html, useEffect, useLayoutEffect, useRef } from "edgerun/preact";

import { useFollowScroll } from "../follow_scroll.js";
import { Icon } from "../icons.js";
import { pathOf, set, state, useStore } from "../store.js";
import { strings } from "../strings.js";
import { Composer } from "./composer.js";
import { IconButton } from "./dialogs.js";
import { MessageList } from "./message_list.js";
import { ModelSwitcher } from "./models.js";
import { Welcome } from "./welcome.js";

function Header({ conversation }) {
  const title = conversation ? conversation.title || strings.sidebar.untitled : strings.chat.newTitle;
  useEffect(() => {
    document.title = conversation ? `${title} · edge-run` : "edge-run";
  }, [title, conversation]);
  return html`<header class="chat-header">
    <${IconButton} icon="menu" className="drawer-open" label=${strings.sidebar.show} onClick=${() => set({ drawer: true })} />
    <h1 title=${title}>${title}</h1>
    <${ModelSwitcher} conversation=${conversation} />
    <${IconButton}
      icon="sliders"
      label=${strings.chat.settings}
      onClick=${() => set({ dialog: { name: "conversation", id: conversation?.id ?? null } })}
    />
  </header>`;
}

function moveBetweenMessages(event, scroller) {
  if (!event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
  const items = [...scroller.querySelectorAll("[data-message]")];
  if (!items.length) return;
  event.preventDefault();
  const at = items.indexOf(document.activeElement.closest("[data-message]"));
  const next = at < 0 ? items.length - 1 : at + (event.key === "ArrowUp" ? -1 : 1);
  if (next >= items.length) document.querySelector("#composer-text")?.focus();
  else items[Math.max(0, next)].focus();
}

/** Keeps the focus in its place when the message that has it is replaced by another of its branches, or deleted. */
function useKeptFocus(content, path) {
  const place = useRef(-1);
  useLayoutEffect(() => {
    if (place.current < 0 || document.activeElement !== document.body) return;
    const items = content.current.querySelectorAll("[data-message]");
    items[Math.min(place.current, items.length - 1)]?.focus({ preventScroll: true });
  }, [path]);
  return {
    onFocusIn: (event) => {
      place.current = path.indexOf(event.target.closest("[data-message]")?.dataset.message);
    },
    onFocusOut: (event) => {
      if (event.relatedTarget && !content.current.contains(event.relatedTarget)) place.current = -1;
    },
  };
}

/** The chat of the conversation `id`; null is one that is created with its first message. */
export function Chat({ id }) {
  const conversation = useStore((current) => current.conversations.find((item) => item.id === id));
  const tree = useStore((current) => current.trees.get(id));
  const structure = useStore((current) => current.trees.get(id)?.structure);
  const failure = useStore((current) => current.failures.get(id));
  const path = useStore(() => pathOf(id));
  const target = useStore((current) => current.target);
  const ready = id === null || (!!tree && !!conversation);
  const { scroller, content, following, toEnd, toMessage } = useFollowScroll(id, ready);
  const own = useStore((current) => current.ownAnswer);

  const focusing = useKeptFocus(content, path);
  const last = path[path.length - 1];
  useLayoutEffect(() => {
    if (own === null || own !== last) return; // another window's question does not move this one's view
    state.ownAnswer = null;
    toEnd();
  }, [own, last]);
  useLayoutEffect(() => {
    if (!target || !path.includes(target)) return;
    state.target = null;
    toMessage(target);
    scroller.current.querySelector(`[data-message="${CSS.escape(target)}"]`)?.focus({ preventScroll: true });
  }, [target, path]);
  useLayoutEffect(() => {
    const press = (event) => scroller.current && moveBetweenMessages(event, scroller.current);
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);

  return html`<main class="chat">
    <${Header} conversation=${conversation} />
    <div class="scroller" ref=${scroller} tabindex="-1">
      <div class="column" ref=${content} ...${focusing}>
        ${failure && !tree && html`<p class="failure" role="alert">${failure}</p>`}
        ${!ready && !failure && html`<p class="quiet" role="status">${strings.chat.loading}</p>`}
        ${id === null
          ? html`<${Welcome} />`
          : tree && html`<${MessageList} conversation=${id} path=${path} structure=${structure} />`}
      </div>
    </div>
    <div class="composer-place">
      ${!following &&
      html`<button type="button" class="button to-end" onClick=${toEnd}><${Icon} name="down" />${strings.chat.toEnd}</button>`}
      <${Composer} key=${id ?? "new"} id=${id} conversation=${conversation} leaf=${last ?? null} />
    </div>
  </main>`;
}
