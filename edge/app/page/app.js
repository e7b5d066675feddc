/** The root of the page: layout, the page that the address names, dialogs. */

import { html, render, useEffect, useLayoutEffect, useState } from "edgerun/preact";

import { attempt, changeConversation, reportError, set, start, useStore } from "./store.js";
import { strings } from "./strings.js";
import { Chat } from "./views/chat.js";
import { ConversationSettings } from "./views/conversation_settings.js";
import { PromptDialog } from "./views/dialogs.js";
import { RegenerateDialog } from "./views/models.js";
import { Announcer, ConnectionBanner, Notices } from "./views/notices.js";
import { Palette } from "./views/palette.js";
import { SettingsPage } from "./views/settings.js";
import { ShortcutsDialog, useShortcuts } from "./views/shortcuts.js";
import { Sidebar } from "./views/sidebar.js";

/** Pages that are fetched when they are first shown, by the first part of the address behind `#/`. */
const LAZY_PAGES = {
  models: async () => (await import("./views/models.js")).ModelsPage,
  exports: async () => (await import("./views/export.js")).ExportPage,
  compare: async () => (await import("./views/comparison.js")).ComparisonPage,
  exactness: async () => (await import("./views/exactness.js")).ExactnessPage,
};

function LazyPage({ name }) {
  const [page, setPage] = useState(null);
  useEffect(() => {
    LAZY_PAGES[name]().then((component) => setPage(() => component), reportError);
  }, [name]);
  return page ? html`<${page} />` : html`<main class="page"><p class="quiet" role="status">${strings.chat.loading}</p></main>`;
}

function Page() {
  const page = useStore((state) => state.route.page);
  const id = useStore((state) => state.route.id);
  if (page === "chat") return html`<${Chat} key=${id} id=${id} />`;
  if (page === "settings") return html`<${SettingsPage} />`;
  return html`<${LazyPage} key=${page} name=${page} />`;
}

function RenameDialog({ conversation, onClose }) {
  return html`<${PromptDialog}
    title=${strings.sidebar.renameTitle}
    label=${strings.conversation.name}
    value=${conversation.title ?? ""}
    save=${strings.common.save}
    onSave=${(title) => attempt(() => changeConversation(conversation.id, { title }))}
    onClose=${onClose}
  />`;
}

function FolderDialog({ conversation, onClose }) {
  const folders = useStore((state) => [
    ...new Set([...state.folders, ...state.conversations.map((item) => item.folder).filter(Boolean)]),
  ]);
  return html`<${PromptDialog}
    title=${strings.sidebar.moveTitle}
    label=${strings.sidebar.moveLabel}
    value=${conversation.folder ?? ""}
    save=${strings.sidebar.moveSave}
    choices=${folders}
    optional
    onSave=${(folder) => attempt(() => changeConversation(conversation.id, { folder: folder || null }))}
    onClose=${onClose}
  />`;
}

const DIALOGS = {
  palette: Palette,
  shortcuts: ShortcutsDialog,
  conversation: ConversationSettings,
  rename: RenameDialog,
  folder: FolderDialog,
  regenerate: RegenerateDialog,
};

function OpenDialog() {
  const dialog = useStore((state) => state.dialog);
  if (!dialog) return null;
  const { name, ...props } = dialog;
  return html`<${DIALOGS[name]} key=${name} ...${props} onClose=${() => set({ dialog: null })} />`;
}

function App() {
  const theme = useStore((state) => state.settings.theme);
  const fontSize = useStore((state) => state.settings.font_size);
  const drawer = useStore((state) => state.drawer);
  useShortcuts();
  useLayoutEffect(() => {
    const root = document.documentElement;
    if (theme === "system") delete root.dataset.theme;
    else root.dataset.theme = theme;
    root.style.setProperty("--font-size", `${fontSize / 16}rem`);
  }, [theme, fontSize]);
  return html`<a class="skip" href="#composer-text" onClick=${skip}>${strings.chat.skip}</a>
    <${ConnectionBanner} />
    <div class=${drawer ? "layout drawer-shown" : "layout"}>
      <${Sidebar} />
      <div class="drawer-shade" onClick=${() => set({ drawer: false })}></div>
      <${Page} />
      <${Notices} />
    </div>
    <${Announcer} />
    <${OpenDialog} />`;
}

function skip(event) {
  event.preventDefault(); // the part behind # is the page's address
  document.querySelector("#composer-text, main h1")?.focus();
}

start();
render(html`<${App} />`, document.querySelector("#app"));
