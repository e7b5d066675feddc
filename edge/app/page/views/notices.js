/** Notices with actions, the banner of a lost connection, and what screen readers are told. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "edgerun/preact";

import { dismissNotice, useStore } from "../store.js";
import { strings } from "../strings.js";
import { IconButton } from "./dialogs.js";

const SHOWN_MS = 10000;
const SHOWN_LONG_MS = 30000; // errors, and what can be acted on: WCAG 2.2.1 asks for twenty seconds at least
const LOST_AFTER_MS = 1200;

function Notice({ notice }) {
  const [held, setHeld] = useState(false);
  useEffect(() => {
    if (held) return undefined;
    const long = notice.action || notice.kind === "error";
    const timer = setTimeout(() => dismissNotice(notice.id), long ? SHOWN_LONG_MS : SHOWN_MS);
    return () => clearTimeout(timer);
  }, [held, notice]);
  const act = () => {
    dismissNotice(notice.id);
    notice.action.run();
  };
  return html`<div
    class=${`notice ${notice.kind}`}
    onPointerMove=${(event) => setHeld(event.pointerType !== "touch")}
    onPointerLeave=${() => setHeld(false)}
    onFocusIn=${() => setHeld(true)}
    onFocusOut=${() => setHeld(false)}
  >
    <span>${notice.text}</span>
    ${notice.action && html`<button type="button" class="button small" onClick=${act}>${notice.action.label}</button>`}
    <${IconButton} icon="close" label=${strings.notices.dismiss} onClick=${() => dismissNotice(notice.id)} />
  </div>`;
}

/** The notices that are shown now, the latest at the bottom. Ctrl+Z runs the latest one's action. */
export function Notices() {
  const notices = useStore((state) => state.notices);
  const latest = useRef(notices);
  latest.current = notices;
  useLayoutEffect(() => {
    const undo = (event) => {
      if (event.key.toLowerCase() !== "z" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
      if (event.target.closest?.("input, textarea") && event.target.value) return; // text has its own undo
      const notice = latest.current.findLast((shown) => shown.action);
      if (!notice) return;
      event.preventDefault();
      dismissNotice(notice.id);
      notice.action.run();
    };
    addEventListener("keydown", undo);
    return () => removeEventListener("keydown", undo);
  }, []);
  return html`<div class="notices" role="status" aria-live="polite" aria-label=${strings.notices.label}>
    ${notices.map((notice) => html`<${Notice} key=${notice.id} notice=${notice} />`)}
  </div>`;
}

/** Says that the app's process does not answer; goes away by itself when it does again. */
export function ConnectionBanner() {
  const connection = useStore((state) => state.connection);
  const words = strings.connection[connection];
  const [shown, setShown] = useState(false);
  useEffect(() => {
    if (!words) {
      setShown(false);
      return undefined;
    }
    const timer = setTimeout(() => setShown(true), LOST_AFTER_MS); // a short break is not worth a word
    return () => clearTimeout(timer);
  }, [words]);
  return html`<div class="banner-place" role="alert">
    ${shown && words && html`<div class="banner"><strong>${words.what}</strong> ${words.more}</div>`}
  </div>`;
}

/** Text for screen readers alone: such as that an answer has ended. */
export function Announcer() {
  const text = useStore((state) => state.announcement);
  return html`<div class="visually-hidden" aria-live="polite">${text}</div>`;
}
