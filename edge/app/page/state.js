/** The state of the page, and the hook by which views follow a part of it. */

import { Component, h, useLayoutEffect, useRef, useState } from "edgerun/preact";

/** Containers are changed in place, what is in them is replaced: views compare what they select by identity. */
export const state = {
  /** "opening", "open", "lost" (no app answers) or "refused" (the app does not know this browser) */
  connection: "opening",
  loaded: false,
  version: "",
  settings: { theme: "system", font_size: 16, enter_sends: true, token_details: true, show_statistics: true },
  presets: [],
  folders: [],
  models: [],
  /** Models that make vectors or scores of texts, and no text. */
  encoders: [],
  defaultModel: null,
  machine: {},
  conversations: [],
  deleted: null,
  /** For how many days deleted conversations can be restored. */
  keptDays: 30,
  route: { page: "chat", id: null },
  /** Message to be scrolled to when its conversation is shown. */
  target: null,
  /** The latest answer that this window has asked for: the view goes there. */
  ownAnswer: null,
  /** What a conversation that has not been created yet will begin with. */
  fresh: {},
  /** @type {Map<string, import("./message_tree.js").MessageTree>} */
  trees: new Map(),
  /** Why a conversation could not be read, by its id. */
  failures: new Map(),
  /** @type {Map<string, {stage: string, fraction: number|null}>} by the answer in progress */
  progress: new Map(),
  /** @type {Map<string, Set<string>>} ids of messages that the model no longer sees, by conversation */
  trimmed: new Map(),
  /** @type {Set<string>} conversations in which an answer is being written */
  writing: new Set(),
  notices: [],
  announcement: "",
  dialog: null,
  drawer: false,
};

const listeners = new Set();
let frame = 0;
let waiting = false;

/** Tells all views to look at the state again. */
export function changed() {
  if (waiting) changedSoon();
  else for (const listener of listeners) listener();
}

/** Changes the state by `action`; views look at it in the next frame, once for all such changes. */
export function changing(action) {
  waiting = true;
  try {
    action();
  } finally {
    waiting = false;
  }
}

function changedSoon() {
  if (frame) return;
  const run = () => {
    cancelAnimationFrame(frame);
    clearTimeout(timer);
    frame = 0;
    changed();
  };
  const timer = setTimeout(run, 100); // frames stand still in a window that is covered
  frame = requestAnimationFrame(run);
}

/** Changes fields of the state. */
export function set(changes) {
  Object.assign(state, changes);
  changed();
}

function same(a, b) {
  if (Object.is(a, b)) return true;
  if (!Array.isArray(a) || !Array.isArray(b) || a.length !== b.length) return false;
  return a.every((item, index) => Object.is(item, b[index]));
}

/**
 * Follows a part of the state.
 *
 * @template T
 * @param {(state: typeof import("./state.js").state) => T} select arrays are compared item by item
 * @returns {T}
 */
export function useStore(select) {
  const [, refresh] = useState(0);
  const latest = useRef(null);
  const selected = select(state);
  latest.current = { select, selected };
  useLayoutEffect(() => {
    const listener = () => {
      if (!same(latest.current.select(state), latest.current.selected)) refresh((count) => count + 1);
    };
    listener();
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return selected;
}

function differ(a, b) {
  const names = Object.keys(a);
  return names.length !== Object.keys(b).length || names.some((name) => !same(a[name], b[name]));
}

/**
 * A component that is rendered again only when one of its props is another, or what it follows has changed. Arrays are
 * compared item by item.
 */
export function memo(component) {
  return class extends Component {
    shouldComponentUpdate(next) {
      return differ(this.props, next);
    }

    render(props) {
      return h(component, props);
    }
  };
}
