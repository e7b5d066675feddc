/** The list of conversations, with folders, pinned and deleted ones. */

import { html, useLayoutEffect, useMemo, useRef } from "edgerun/preact";

import { exportUrl } from "../api.js";
import { Icon } from "../icons.js";
import {
  attempt,
  changeConversation,
  deleteConversation,
  memo,
  openConversation,
  restoreConversation,
  set,
  showDeleted,
  useStore,
} from "../store.js";
import { strings } from "../strings.js";
import { IconButton, Menu } from "./dialogs.js";

const DAY = 86400;

function dateGroup(updated, midnight) {
  if (updated >= midnight) return strings.sidebar.today;
  if (updated >= midnight - DAY) return strings.sidebar.yesterday;
  if (updated >= midnight - 7 * DAY) return strings.sidebar.week;
  if (updated >= midnight - 30 * DAY) return strings.sidebar.month;
  return strings.sidebar.older;
}

/** Conversations in groups `{title, folder, conversations}`: pinned ones, folders by name, then the rest by date. */
function grouped(conversations) {
  const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
  const groups = new Map();
  const add = (key, title, folder, conversation) => {
    if (!groups.has(key)) groups.set(key, { key, title, folder, conversations: [] });
    groups.get(key).conversations.push(conversation);
  };
  const sorted = [...conversations].sort((a, b) => b.updated - a.updated);
  const inFolders = sorted.filter((item) => !item.pinned && item.folder);
  for (const item of sorted) if (item.pinned) add("pinned", strings.sidebar.pinned, false, item);
  for (const item of inFolders.sort((a, b) => a.folder.localeCompare(b.folder) || b.updated - a.updated)) {
    add(`folder ${item.folder}`, item.folder, true, item);
  }
  for (const item of sorted) {
    if (item.pinned || item.folder) continue;
    const title = dateGroup(item.updated, midnight);
    add(title, title, false, item);
  }
  return [...groups.values()];
}

function download(url) {
  const link = document.createElement("a");
  link.href = url;
  link.download = "";
  link.click();
}

function menuItems(conversation) {
  const { id, pinned } = conversation;
  return [
    { label: strings.sidebar.rename, icon: "edit", run: () => set({ dialog: { name: "rename", conversation } }) },
    {
      label: pinned ? strings.sidebar.unpin : strings.sidebar.pin,
      icon: "pin",
      run: () => attempt(() => changeConversation(id, { pinned: !pinned })),
    },
    { label: strings.sidebar.move, icon: "folder", run: () => set({ dialog: { name: "folder", conversation } }) },
    { label: strings.sidebar.exportMarkdown, icon: "down", run: () => download(exportUrl(id, "markdown")) },
    { label: strings.sidebar.exportJson, icon: "down", run: () => download(exportUrl(id, "json")) },
    {
      label: strings.sidebar.delete,
      icon: "bin",
      danger: true,
      run: () => attempt(() => deleteConversation(conversation)),
    },
  ];
}

const Row = memo(function Row({ conversation }) {
  const { id } = conversation;
  const current = useStore((state) => state.route.page === "chat" && state.route.id === id);
  const writing = useStore((state) => state.writing.has(id));
  const title = conversation.title || strings.sidebar.untitled;
  const press = (event) => {
    if (event.key === "F2") set({ dialog: { name: "rename", conversation } });
    else if (event.key === "Delete") attempt(() => deleteConversation(conversation));
    else return;
    event.preventDefault();
  };
  return html`<li class=${current ? "row current" : "row"}>
    <a
      class="row-link"
      href=${`#/c/${encodeURIComponent(id)}`}
      aria-current=${current ? "page" : undefined}
      title=${title}
      dir="auto"
      onKeyDown=${press}
      >${title}${writing && html`<span class="writing-dot" role="img" aria-label=${strings.sidebar.writing}></span>`}</a
    >
    <${Menu} label=${strings.sidebar.actions(title)} items=${() => menuItems(conversation)} className="icon-button row-menu" />
  </li>`;
});

function Group({ group }) {
  const rows = html`<ul>
    ${group.conversations.map((item) => html`<${Row} key=${item.id} conversation=${item} />`)}
  </ul>`;
  if (!group.folder) return html`<section class="group"><h3>${group.title}</h3>${rows}</section>`;
  return html`<details class="group folder" open>
    <summary><${Icon} name="folder" />${group.title}<span class="count">${group.conversations.length}</span></summary>
    ${rows}
  </details>`;
}

function DeletedList({ conversations }) {
  const keptDays = useStore((state) => state.keptDays);
  const restore = (id) => attempt(() => restoreConversation(id));
  const back = () => {
    attempt(() => showDeleted(false));
    document.querySelector(".deleted-toggle").focus();
  };
  const about = ({ deleted }) =>
    strings.sidebar.deletedOn(deleted, Math.ceil(keptDays - (Date.now() / 1000 - deleted) / DAY));
  return html`<section class="group">
    <button type="button" class="button small" onClick=${back}><${Icon} name="left" />${strings.sidebar.back}</button>
    <h3>${strings.sidebar.deleted}</h3>
    ${conversations.length === 0 && html`<p class="quiet">${strings.sidebar.nothingDeleted}</p>`}
    <ul>
      ${conversations.map(
        (item) =>
          html`<li key=${item.id} class="row">
            <span class="row-link" title=${item.title}
              >${item.title || strings.sidebar.untitled}<small class="quiet">${about(item)}</small></span
            >
            <button type="button" class="button small" onClick=${() => restore(item.id)}>${strings.sidebar.restore}</button>
          </li>`,
      )}
    </ul>
  </section>`;
}

/** A link to a page; `others` are pages that are reached from it. */
function PageLink({ page, others = [], icon, label }) {
  const current = useStore((state) => [page, ...others].includes(state.route.page));
  return html`<a class="page-link" href=${`#/${page}`} aria-current=${current ? "page" : undefined}
    ><${Icon} name=${icon} />${label}</a
  >`;
}

/** The side of the window with everything that leads elsewhere. */
export function Sidebar() {
  const conversations = useStore((state) => state.conversations);
  const deleted = useStore((state) => state.deleted);
  const loaded = useStore((state) => state.loaded);
  const groups = useMemo(() => grouped(conversations), [conversations]);
  const drawer = useStore((state) => state.drawer);
  const list = useRef(null);
  const sidebar = useRef(null);
  useLayoutEffect(() => {
    if (!drawer) return undefined;
    const opener = document.activeElement;
    sidebar.current.querySelector(".drawer-close").focus();
    return () => opener?.isConnected && opener.focus();
  }, [drawer]);

  const move = (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp" && event.key !== "Home" && event.key !== "End") return;
    const links = [...list.current.querySelectorAll("a.row-link, summary")].filter((item) => item.offsetParent);
    const at = links.indexOf(document.activeElement);
    if (at < 0) return;
    event.preventDefault();
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: links.length - 1 }[event.key];
    links[Math.max(0, Math.min(next, links.length - 1))].focus();
  };
  return html`<aside ref=${sidebar} class="sidebar" aria-label=${strings.sidebar.label}>
    <div class="sidebar-top">
      <a class="brand" href="#/"><img src="/page/icon.svg" alt="" width="22" height="22" />edge-run</a>
      <${IconButton} icon="search" label=${strings.sidebar.search} onClick=${() => set({ dialog: { name: "palette" } })} />
      <${IconButton}
        icon="close"
        className="drawer-close"
        label=${strings.sidebar.hide}
        onClick=${() => set({ drawer: false })}
      />
    </div>
    <button type="button" class="button new-chat" onClick=${() => openConversation(null)}>
      <${Icon} name="plus" />${strings.sidebar.newChat}
    </button>
    <nav class="conversations" ref=${list} aria-label=${strings.sidebar.conversations} onKeyDown=${move}>
      ${deleted
        ? html`<${DeletedList} conversations=${deleted} />`
        : groups.map((group) => html`<${Group} key=${group.key} group=${group} />`)}
      ${!deleted && loaded && groups.length === 0 && html`<p class="quiet">${strings.sidebar.empty}</p>`}
    </nav>
    <nav class="sidebar-bottom" aria-label=${strings.sidebar.pages}>
      <button type="button" class="page-link deleted-toggle" aria-pressed=${!!deleted} onClick=${() => attempt(() => showDeleted(!deleted))}>
        <${Icon} name="bin" />${strings.sidebar.deleted}
      </button>
      <${PageLink} page="models" others=${["exports", "compare", "exactness"]} icon="model" label=${strings.sidebar.models} />
      <${PageLink} page="settings" icon="gear" label=${strings.sidebar.settings} />
      <button type="button" class="page-link" onClick=${() => set({ dialog: { name: "shortcuts" } })}>
        <${Icon} name="keyboard" />${strings.sidebar.shortcuts}
      </button>
    </nav>
  </aside>`;
}
