/**
 * Preact with its hooks, and `html` templates bound to it by htm.
 *
 * Every module of the page imports these names from "edgerun/preact", which the import map of index.html resolves.
 */
import htm from "htm";
import { h } from "preact";

/** Tagged template that makes Preact elements: html`<p class="note">${text}</p>`. */
export const html = htm.bind(h);

export { cloneElement, Component, createContext, createPortal, createRef, Fragment, h, options, render, toChildArray } from "preact";
export {
  useCallback,
  useContext,
  useEffect,
  useErrorBoundary,
  useId,
  useImperativeHandle,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "preact/hooks";
