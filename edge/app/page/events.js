/** The channel of events from the app: opened again with backoff, closed while the window is hidden. */

import { EVENTS_URL } from "./api.js";

const FIRST_DELAY = 300;
const LONGEST_DELAY = 2000; // the app is on this machine: asking costs nothing

/**
 * Follows the app's events for as long as the page lives.
 *
 * @param {object} handlers
 * @param {(event: object) => void} handlers.event
 * @param {() => void} handlers.open called whenever the channel is open: what was missed has to be fetched
 * @param {() => void} handlers.lost called when the channel breaks, and after each attempt that failed
 */
export function followEvents({ event, open, lost }) {
  let source = null;
  let delay = FIRST_DELAY;
  let timer = 0;

  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  function connect() {
    close();
    if (document.hidden) return; // a browser allows six connections to one server
    const channel = new EventSource(EVENTS_URL);
    source = channel;
    channel.onopen = () => {
      delay = FIRST_DELAY;
      open();
    };
    channel.onmessage = (message) => event(JSON.parse(message.data));
    channel.onerror = () => {
      if (source !== channel) return;
      close();
      lost();
      timer = setTimeout(connect, delay * (0.75 + Math.random() / 2));
      delay = Math.min(delay * 1.7, LONGEST_DELAY);
    };
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else connect();
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (shown) => {
    if (shown.persisted) connect();
  });
  addEventListener("online", connect);
  connect();
}
