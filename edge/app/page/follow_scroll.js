/** Scrolling of a conversation: follows an answer only while the reader is at its end. */

import { useCallback, useLayoutEffect, useRef, useState } from "edgerun/preact";

const AT_END = 4; // pixels that rounding may leave
/** Where each conversation was left: the message at the top of the view and how far into it, or null for its end. */
const places = new Map();

/** The first of elements that follow one another which ends below `top`. */
function firstBelow(items, top) {
  let low = 0;
  let high = items.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items[middle].getBoundingClientRect().bottom > top + 1) high = middle;
    else low = middle + 1;
  }
  return items[low];
}

function firstVisible(scroller) {
  const top = scroller.getBoundingClientRect().top;
  // Messages of other groups have no places: they are not laid out.
  const group = firstBelow(scroller.querySelectorAll(".message-group"), top);
  const item = group && firstBelow(group.querySelectorAll("[data-message]"), top);
  return item && { id: item.dataset.message, offset: item.getBoundingClientRect().top - top };
}

/**
 * Keeps the view of a conversation where its reader wants it.
 *
 * @param {string|null} conversation
 * @param {boolean} ready whether its messages are shown, so that the place can be restored
 * @returns {{scroller: object, content: object, following: boolean, toEnd: () => void, toMessage: (id: string) => void}}
 *   refs of the scrolling element and of what it contains; whether the view is at its end; ways to go there
 */
export function useFollowScroll(conversation, ready) {
  const scroller = useRef(null);
  const content = useRef(null);
  const following = useRef(true);
  const lastTop = useRef(0);
  const restoring = useRef(0);
  const [shown, setShown] = useState(true);

  const follow = useCallback((value) => {
    following.current = value;
    setShown(value);
  }, []);

  const toEnd = useCallback(() => {
    follow(true);
    const element = scroller.current;
    element.scrollTop = element.scrollHeight;
    lastTop.current = element.scrollTop;
  }, []);

  const toOffset = useCallback((id, offset) => {
    const element = scroller.current;
    const item = element.querySelector(`[data-message="${CSS.escape(id)}"]`);
    if (!item) return false;
    // Heights of messages outside of the view are estimates until they are shown: correct the place a few times.
    let rounds = 6;
    restoring.current += 1;
    const own = restoring.current;
    const step = () => {
      if (own !== restoring.current || !item.isConnected) return;
      element.scrollTop += item.getBoundingClientRect().top - element.getBoundingClientRect().top - offset;
      lastTop.current = element.scrollTop;
      rounds -= 1;
      if (rounds) requestAnimationFrame(step);
    };
    follow(false);
    step();
    return true;
  }, []);

  const toMessage = useCallback((id) => toOffset(id, 24), []);

  useLayoutEffect(() => {
    const element = scroller.current;
    if (!element || conversation === null) return undefined; // nothing to follow in a new chat
    let frame = 0;
    const scrolled = () => {
      const distance = element.scrollHeight - element.scrollTop - element.clientHeight;
      if (distance <= AT_END) follow(true);
      else if (element.scrollTop < lastTop.current) follow(false); // the content growing does not move the view up
      lastTop.current = element.scrollTop;
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => {
        if (ready) places.set(conversation, following.current ? null : firstVisible(element));
      });
    };
    const touched = () => {
      restoring.current += 1;
    };
    const observer = new ResizeObserver(() => {
      if (following.current) {
        element.scrollTop = element.scrollHeight;
        lastTop.current = element.scrollTop;
      }
    });
    observer.observe(content.current);
    observer.observe(element);
    element.addEventListener("scroll", scrolled, { passive: true });
    element.addEventListener("wheel", touched, { passive: true });
    element.addEventListener("pointerdown", touched, { passive: true });
    return () => {
      cancelAnimationFrame(frame);
      observer.disconnect();
      element.removeEventListener("scroll", scrolled);
      element.removeEventListener("wheel", touched);
      element.removeEventListener("pointerdown", touched);
    };
  }, [conversation, ready]);

  useLayoutEffect(() => {
    if (!ready || !scroller.current) return;
    if (conversation === null) {
      follow(true);
      scroller.current.scrollTop = 0;
      return;
    }
    const place = places.get(conversation);
    if (!place || !toOffset(place.id, place.offset)) toEnd();
  }, [conversation, ready]);

  return { scroller, content, following: shown, toEnd, toMessage };
}
