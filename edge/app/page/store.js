/** Actions of the page, and what the app's events change in its state. */

import * as api from "./api.js";
import { followEvents } from "./events.js";
import { MessageTree } from "./message_tree.js";
import { changed, changing, set, state } from "./state.js";
import { strings } from "./strings.js";

export { memo, set, state, useStore } from "./state.js";

let noticeCount = 0;

/**
 * Shows a notice below the page, until another page is shown or its time is over.
 *
 * @param {object} notice
 * @param {string} notice.text
 * @param {"information"|"error"} [notice.kind]
 * @param {{label: string, run: () => void}} [notice.action] such as undoing
 */
export function notify({ text, kind = "information", action = null }) {
  noticeCount += 1;
  const kept = state.notices.filter((other) => other.text !== text).slice(-3);
  set({ notices: [...kept, { id: noticeCount, text, kind, action, page: location.hash }] });
}

/** Takes a notice away. */
export function dismissNotice(id) {
  set({ notices: state.notices.filter((notice) => notice.id !== id) });
}

/** Shows an error of a request; what is not an `ApiError` is a defect of the page and goes to the console too. */
export function reportError(error) {
  if (error.name === "AbortError") return;
  if (error.name !== "ApiError") console.error(error);
  if (error.code === "unreachable") set({ connection: "lost" });
  else if (error.status === 401) set({ connection: "refused" });
  else notify({ text: error.message, kind: "error" });
}

/** Runs an action of the user; where it fails, its error is shown and the promise gives undefined. */
export async function attempt(action) {
  try {
    return await action();
  } catch (error) {
    reportError(error);
    return undefined;
  }
}

/** Has screen readers say `text`. */
export function announce(text) {
  set({ announcement: "" });
  setTimeout(() => set({ announcement: text }), 50); // the same text twice would not be a change
}

// ---------------------------------------------------------------- what the server has

/** Settles when the app has taken, or refused, every change of its settings that this window has asked for. */
let settingsChanged = Promise.resolve();

/** Fetches settings, presets, folders and models. What was read before a change of the settings is out of date. */
export async function refreshState() {
  let got;
  let known;
  do {
    known = settingsChanged;
    await known;
    got = await api.getState();
  } while (known !== settingsChanged);
  set({
    loaded: true,
    version: got.version,
    settings: { ...state.settings, ...got.settings },
    presets: got.presets,
    folders: got.folders,
    models: got.models.filter((model) => model.capabilities.includes("completion")),
    encoders: got.models.filter((model) => !model.capabilities.includes("completion")),
    defaultModel: got.default_model,
    machine: got.machine,
    keptDays: got.kept_days,
  });
}

/** Fetches the list of conversations, and of deleted ones where it is shown. */
export async function refreshConversations() {
  let got;
  let known;
  do {
    known = state.conversations;
    got = await api.getConversations();
  } while (known !== state.conversations); // the response may be older than what changed the list meanwhile
  const writing = new Set(got.writing ?? state.writing);
  set({ conversations: got.conversations, writing });
  if (state.deleted) await refreshDeleted();
}

/** Shows or hides the list of deleted conversations. */
export async function showDeleted(shown) {
  set({ deleted: shown ? (await api.getDeletedConversations()).conversations : null });
}

/** Fetches the list of deleted conversations again. It may have been hidden when the response arrives. */
async function refreshDeleted() {
  const { conversations } = await api.getDeletedConversations();
  if (state.deleted) set({ deleted: conversations });
}

const fetching = new Map();

/**
 * Fetches a conversation with its messages. Pieces of answers that arrive meanwhile are added afterwards; after other
 * changes of messages it is fetched again, since the response may be older than they are.
 */
export async function fetchConversation(id) {
  if (fetching.has(id)) {
    fetchAgain(id);
    return;
  }
  const job = { again: false, deltas: [] };
  fetching.set(id, job);
  try {
    const got = await api.getConversation(id);
    const tree = new MessageTree(got.messages, got.writing ?? [], state.trees.get(id));
    for (const { message, stage, fraction } of got.writing ?? []) {
      if (stage) state.progress.set(message, { stage, fraction });
    }
    state.trees.set(id, tree);
    state.failures.delete(id);
    if (got.trimmed) state.trimmed.set(id, new Set(got.trimmed));
    setWriting(id, tree);
    for (const delta of job.deltas) tree.append(delta.message, delta.sequence, delta.text, delta.rate);
    replaceConversation(got.conversation);
  } catch (error) {
    if (error.code === "unreachable") reportError(error);
    else state.failures.set(id, error.message);
  } finally {
    fetching.delete(id);
    changed();
  }
  if (job.again) await fetchConversation(id);
}

/** Has a conversation that is being fetched fetched once more. */
function fetchAgain(id) {
  const underWay = fetching.get(id);
  if (underWay) underWay.again = true;
}

function setWriting(id, tree) {
  const writes = [...tree.messages.values()].some((message) => message.state === "writing");
  if (writes !== state.writing.has(id)) {
    state.writing = new Set(state.writing);
    if (writes) state.writing.add(id);
    else state.writing.delete(id);
  }
}

function replaceConversation(conversation) {
  const others = state.conversations.filter((other) => other.id !== conversation.id);
  const deleted = state.deleted?.filter((other) => other.id !== conversation.id) ?? null;
  if (!conversation.deleted) set({ conversations: [conversation, ...others], deleted });
  else set({ conversations: others, deleted: deleted && [conversation, ...deleted] });
}

/** The conversation of this id, or undefined. */
export function conversationOf(id) {
  return state.conversations.find((conversation) => conversation.id === id);
}

/** The messages that are shown of a conversation, from the first to the leaf. */
export function pathOf(id) {
  return state.trees.get(id)?.path(conversationOf(id)?.leaf) ?? [];
}

/** The answer that is being written in the shown branch of a conversation, or undefined. */
export function answerInProgress(id) {
  const tree = state.trees.get(id);
  const path = pathOf(id);
  const last = tree?.messages.get(path[path.length - 1]);
  return last?.state === "writing" ? last : undefined;
}

// ---------------------------------------------------------------- events

/** Says that an answer waits for a decision about a call. */
function announceCall(before, message) {
  const known = before?.rounds?.at(-1)?.calls.map((call) => call.id) ?? [];
  const call = message.rounds?.at(-1)?.calls.find((item) => item.state === "waiting" && !known.includes(item.id));
  if (call) announce(strings.calls.asks(call.name));
}

const HANDLERS = {
  conversation: ({ conversation }) => replaceConversation(conversation),
  conversation_deleted({ id }) {
    const conversation = conversationOf(id);
    if (conversation) forgetConversation(conversation);
    if (state.deleted) attempt(refreshDeleted);
  },
  message({ message }) {
    fetchAgain(message.conversation);
    const tree = state.trees.get(message.conversation);
    const before = tree?.messages.get(message.id);
    if (message.state !== "writing") state.progress.delete(message.id);
    if (message.stats?.trimmed) state.trimmed.set(message.conversation, new Set(message.stats.trimmed));
    if (tree) {
      tree.put(message);
      setWriting(message.conversation, tree);
    } else if (message.role === "assistant") {
      state.writing = new Set(state.writing);
      if (message.state === "writing") state.writing.add(message.conversation);
      else state.writing.delete(message.conversation);
    }
    changed();
    if (message.state === "writing" && state.route.id === message.conversation) announceCall(before, message);
    if (before?.state === "writing" && message.state !== "writing" && state.route.id === message.conversation) {
      announce(strings.announcements[message.state] ?? strings.announcements.complete);
    }
  },
  message_deleted({ id, conversation }) {
    fetchAgain(conversation);
    const tree = state.trees.get(conversation);
    if (!tree) return;
    tree.remove(id);
    setWriting(conversation, tree);
    changed();
  },
  delta(delta) {
    fetching.get(delta.conversation)?.deltas.push(delta);
    const tree = state.trees.get(delta.conversation);
    if (!tree) return;
    state.progress.delete(delta.message);
    if (!tree.append(delta.message, delta.sequence, delta.text, delta.rate)) fetchConversation(delta.conversation);
    changed();
  },
  progress({ conversation, message, stage, fraction }) {
    state.progress.set(message, { stage, fraction });
    state.trees.get(conversation)?.resume(message);
    changed();
  },
  trimmed({ conversation, turns }) {
    state.trimmed.set(conversation, new Set(turns));
    changed();
  },
  settings: () => attempt(refreshState),
  models: () => attempt(refreshState),
  reload: () => refreshAll(),
};

const extraHandlers = new Map();

/**
 * Calls `handler` with every event of a type that the store does not know, such as downloads.
 *
 * @param {string} type
 * @param {(event: object) => void} handler
 * @returns {() => void} ends it
 */
export function onEvent(type, handler) {
  if (!extraHandlers.has(type)) extraHandlers.set(type, new Set());
  extraHandlers.get(type).add(handler);
  return () => extraHandlers.get(type).delete(handler);
}

function receive(event) {
  changing(() => HANDLERS[event.type]?.(event));
  for (const handler of extraHandlers.get(event.type) ?? []) handler(event);
}

/** Fetches everything that is shown: after the channel was closed, or when another process has written. */
export async function refreshAll() {
  const shown = state.route.page === "chat" ? state.route.id : null;
  for (const id of state.trees.keys()) if (id !== shown) state.trees.delete(id);
  await attempt(async () => {
    await Promise.all([refreshState(), refreshConversations(), shown && fetchConversation(shown)]);
    set({ connection: "open" });
    fetchShown(); // the reader may have gone elsewhere meanwhile
  });
}

/** Finds out why the channel of events is closed: the app has ended, or does not know this browser. */
async function lost() {
  try {
    await api.getState();
  } catch (error) {
    set({ connection: error.status === 401 || error.status === 403 ? "refused" : "lost" });
  }
}

/** Begins to follow the app and the address of the page. */
export function start() {
  api.messages.unreachable = strings.errors.unreachable;
  api.messages.unreadable = strings.errors.unreadable;
  addEventListener("hashchange", readRoute);
  readRoute();
  followEvents({ event: receive, open: refreshAll, lost });
}

// ---------------------------------------------------------------- where the page is

const PAGES = new Set(["models", "exports", "compare", "exactness", "settings"]);

/** Fetches the conversation that is shown, if it is not there. What is shown first is fetched with all else. */
function fetchShown() {
  const { id } = state.route;
  if (id && state.connection !== "opening" && !state.trees.has(id)) fetchConversation(id);
}

function readRoute() {
  set({ notices: state.notices.filter((notice) => notice.page === location.hash) });
  const [, page, id] = location.hash.split("/");
  if (PAGES.has(page)) set({ route: { page, id: null }, drawer: false });
  else if (page === "c" && id) {
    set({ route: { page: "chat", id: decodeURIComponent(id) }, drawer: false });
    fetchShown();
  } else set({ route: { page: "chat", id: null }, drawer: false });
}

/** Shows a conversation, or a new one for null, or scrolls to one of its messages. */
export async function openConversation(id, message = null) {
  state.target = message;
  state.drawer = false;
  const hash = id ? `#/c/${encodeURIComponent(id)}` : "#/";
  if (location.hash === hash) changed();
  else location.hash = hash;
  if (message && id) {
    if (!state.trees.has(id)) await fetchConversation(id);
    if (!pathOf(id).includes(message)) await attempt(() => api.changeConversation(id, { leaf: message }));
  }
}

// ---------------------------------------------------------------- actions

/** Changes fields of a conversation; those of one that is not created yet, for null, are kept until it is. */
export async function changeConversation(id, changes) {
  if (id === null) set({ fresh: { ...state.fresh, ...changes } });
  else {
    const got = await api.changeConversation(id, changes);
    if (got.conversation) replaceConversation(got.conversation);
  }
}

/** Takes a deleted conversation out of the list, with a notice that restores it where it was shown. */
function forgetConversation(conversation, noticed = state.route.id === conversation.id) {
  set({ conversations: state.conversations.filter((other) => other.id !== conversation.id) });
  if (state.route.id === conversation.id) openConversation(null);
  if (!noticed) return;
  const restore = async () => {
    await restoreConversation(conversation.id);
    openConversation(conversation.id);
  };
  notify({
    text: strings.notices.conversationDeleted(conversation.title || strings.sidebar.untitled),
    action: { label: strings.notices.undo, run: () => attempt(restore) },
  });
}

/** Deletes a conversation, with a notice that undoes it. */
export async function deleteConversation(conversation) {
  await api.deleteConversation(conversation.id);
  forgetConversation(conversation, true);
}

/** Restores a deleted conversation. */
export async function restoreConversation(id) {
  await api.restoreConversation(id);
  state.trees.delete(id);
  await Promise.all([refreshConversations(), fetchConversation(id)]);
}

function takeNew(conversation, ...messages) {
  const tree = state.trees.get(conversation);
  if (!tree) return;
  const unknown = messages.filter((message) => message && !tree.messages.has(message.id));
  for (const message of unknown) tree.put(message); // known ones may be newer than this response
  const leaf = messages[messages.length - 1];
  const record = conversationOf(conversation);
  if (leaf && record && unknown.length) replaceConversation({ ...record, leaf: leaf.id });
  setWriting(conversation, tree);
  if (leaf?.role === "assistant") state.ownAnswer = leaf.id;
  changed();
}

/** Sends a message, in a conversation that is created for it where `conversation` is null; gives its id. */
export async function sendMessage(conversation, content, attachments) {
  let id = conversation;
  if (id === null) {
    const got = await api.createConversation(state.fresh);
    id = got.conversation.id;
    state.trees.set(id, new MessageTree([], []));
    replaceConversation(got.conversation);
    set({ fresh: {} });
  }
  const path = pathOf(id);
  const got = await api.sendMessage(id, { parent: path[path.length - 1] ?? null, content, attachments });
  takeNew(id, got.message, got.answer);
  return id;
}

/** Rewrites a message in place, or answers the new text in a branch of its own. */
export async function editMessage(message, content, branch) {
  const got = await api.editMessage(message.id, content, branch);
  takeNew(message.conversation, got.message, got.answer);
}

/**
 * Writes another answer beside this one, or several, one after another, of which the first is shown. The model is that
 * of the conversation, or another one.
 */
export async function regenerate(message, count = 1, model = null) {
  const got = await api.regenerateMessage(message.id, count, model);
  takeNew(message.conversation, ...got.answers.slice(1), got.answer);
}

/** Goes on with an answer that has ended early. */
export async function continueAnswer(message) {
  state.trees.get(message.conversation)?.resume(message.id);
  changed();
  try {
    await api.continueMessage(message.id);
  } catch (error) {
    await fetchConversation(message.conversation);
    throw error;
  }
}

/** Says whether a call of a tool is made: "run", "always" or "refuse". */
export const decideCall = (message, call, decision) => api.decideCall(message.id, call, decision);

/** Branches an answer at a token. */
export async function branchAtToken(message, index, alternative) {
  const got = await api.branchAtToken(message.id, index, alternative);
  takeNew(message.conversation, got.answer);
}

/** Stops the answer that is being written in a conversation, and those that are to be written beside it. */
export async function stopAnswer(conversation) {
  const answer = answerInProgress(conversation);
  if (!answer) return;
  const tree = state.trees.get(conversation);
  const writing = tree.siblings(answer.id).filter((id) => tree.messages.get(id).state === "writing");
  // The last one first: otherwise the next one would begin.
  for (const id of writing.reverse()) await api.stopMessage(id);
}

/** Deletes a message with what follows it, with a notice that undoes it. */
export async function deleteMessage(message) {
  const leaf = conversationOf(message.conversation)?.leaf;
  await api.deleteMessage(message.id);
  const restore = async () => {
    await api.restoreMessage(message.id);
    await fetchConversation(message.conversation);
    if (state.trees.get(message.conversation)?.messages.has(leaf)) {
      await changeConversation(message.conversation, { leaf });
    }
  };
  notify({
    text: strings.notices.messageDeleted,
    action: { label: strings.notices.undo, run: () => attempt(restore) },
  });
  await fetchConversation(message.conversation);
}

/** Shows the branch of another message with the same parent. */
export async function selectBranch(message) {
  await changeConversation(message.conversation, { leaf: message.id });
}

/** Changes settings of the app, here at once and then in every window. */
export async function changeSettings(changes) {
  set({ settings: { ...state.settings, ...changes } });
  const change = api.changeSettings(changes);
  settingsChanged = Promise.allSettled([settingsChanged, change]);
  await change;
}

/** The model of a conversation: its record in the list of models, or undefined where it is not there. */
export function modelOf(conversation) {
  const id = (conversation ? conversation.model : state.fresh.model) ?? state.defaultModel;
  return state.models.find((model) => model.id === id);
}
