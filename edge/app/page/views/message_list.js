/** The messages of the shown branch, in groups that are laid out and formatted when they come near the view. */

import { html, useLayoutEffect, useRef, useState } from "edgerun/preact";

import { memo, state, useStore } from "../store.js";
import { strings } from "../strings.js";
import { Message } from "./message.js";

/** Messages of a group. The browser watches the place of every group, and of nothing in it. */
const GROUP = 10;
/** Messages at the end whose groups are formatted at once. */
const EAGER = 6;
const NEAR = "1500px 0px";

/** @type {WeakMap<Element, {observer: IntersectionObserver, calls: Map<Element, () => void>}>} by scrolling element */
const watched = new WeakMap();

/** Calls `seen` when an element is in the view of its scrolling element or not far from it. */
function whenNear(element, seen) {
  const root = element.closest(".scroller");
  if (!watched.has(root)) {
    const calls = new Map();
    const arrived = (entries) => {
      for (const entry of entries) if (entry.isIntersecting) calls.get(entry.target)?.();
    };
    watched.set(root, { observer: new IntersectionObserver(arrived, { root, rootMargin: NEAR }), calls });
  }
  const { observer, calls } = watched.get(root);
  calls.set(element, seen);
  observer.observe(element);
  return () => {
    calls.delete(element);
    observer.unobserve(element);
  };
}

const Group = memo(function Group({ conversation, ids, siblings, eager, last, trimmedTo, trimmedTurns }) {
  const [near, setNear] = useState(eager);
  const box = useRef(null);
  useLayoutEffect(() => (near ? undefined : whenNear(box.current, () => setNear(true))), [near]);
  return html`<div class="message-group" ref=${box}>
    ${ids.map((id, index) => [
      html`<${Message}
        key=${id}
        conversation=${conversation}
        id=${id}
        siblings=${siblings[index]}
        near=${near}
        last=${id === last}
      />`,
      id === trimmedTo && html`<p key="trimmed" class="trimmed-line" role="note">${strings.chat.trimmed(trimmedTurns)}</p>`,
    ])}
  </div>`;
});

/**
 * The messages of a branch.
 *
 * @param {object} props
 * @param {string} props.conversation
 * @param {string[]} props.path ids from the first message to the leaf
 * @param {number} props.structure another number when branches have come or gone, so that the list is rendered again
 */
export const MessageList = memo(function MessageList({ conversation, path }) {
  const tree = state.trees.get(conversation);
  const trimmed = useStore((current) => current.trimmed.get(conversation));
  const trimmedTo = trimmed && path.findLast((id) => trimmed.has(id));
  const trimmedTurns = trimmed ? path.filter((id) => trimmed.has(id) && tree.messages.get(id).role === "user").length : 0;
  const groups = [];
  for (let at = 0; at < path.length; at += GROUP) {
    const ids = path.slice(at, at + GROUP);
    groups.push(
      html`<${Group}
        key=${at}
        conversation=${conversation}
        ids=${ids}
        siblings=${ids.map((id) => tree.siblings(id))}
        eager=${at + GROUP > path.length - EAGER}
        last=${path[path.length - 1]}
        trimmedTo=${ids.includes(trimmedTo) ? trimmedTo : null}
        trimmedTurns=${trimmedTurns}
      />`,
    );
  }
  return groups;
});
