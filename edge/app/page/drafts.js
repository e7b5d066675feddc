/** Text that has been typed and not sent, kept by the browser for each conversation. */

const PREFIX = "edge-run.draft.";
const KEPT = 200;

/** @returns {{text: string, attachments: {name: string, text: string}[]}} */
export function readDraft(conversation) {
  try {
    const draft = JSON.parse(localStorage.getItem(PREFIX + (conversation ?? "new")));
    return { text: String(draft?.text ?? ""), attachments: draft?.attachments ?? [] };
  } catch {
    return { text: "", attachments: [] };
  }
}

/** Keeps a draft; an empty one is removed. */
export function writeDraft(conversation, text, attachments) {
  const key = PREFIX + (conversation ?? "new");
  try {
    if (!text && !attachments.length) localStorage.removeItem(key);
    else localStorage.setItem(key, JSON.stringify({ text, attachments, written: Date.now() }));
  } catch {
    try {
      localStorage.setItem(key, JSON.stringify({ text, attachments: [], written: Date.now() }));
    } catch {
      // The browser keeps nothing for this page: the draft lives as long as the window.
    }
  }
}

/** Removes the oldest drafts, so that those of deleted conversations do not pile up. */
export function forgetOldDrafts() {
  try {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    if (keys.length <= KEPT) return;
    const written = (key) => JSON.parse(localStorage.getItem(key)).written ?? 0;
    keys.sort((a, b) => written(b) - written(a));
    for (const key of keys.slice(KEPT)) localStorage.removeItem(key);
  } catch {
    // Nothing is kept, so nothing piles up.
  }
}
