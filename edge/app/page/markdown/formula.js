/** Formulas: LaTeX as MathML. */

import DOMPurify from "dompurify";
import { h, useEffect, useLayoutEffect, useRef, useState } from "edgerun/preact";

const OPTIONS = { throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 200] };
// Formulas can name elements and link to them; an answer may do neither.
const CLEAN = { USE_PROFILES: { mathMl: true }, ADD_TAGS: ["span"], ADD_ATTR: ["class", "style"], FORBID_TAGS: ["a"], FORBID_ATTR: ["id", "href", "name"], IN_PLACE: true };

let temml = null;
let loading = null;

function loaded() {
  loading ??= import("temml").then((module) => (temml = module.default));
  return loading;
}

/** Writes a formula into an element; false if it cannot be read. */
function write(formula, display, element) {
  const made = document.createElement("span");
  try {
    temml.render(formula, made, { ...OPTIONS, displayMode: display });
  } catch {
    // A formula that is wrong, or too deep or long for the limits, is shown as its source.
    return false;
  }
  element.replaceChildren(...DOMPurify.sanitize(made, CLEAN).childNodes);
  return true;
}

/**
 * A formula; its source while the library is loaded, and where it is not valid.
 *
 * @param {{formula: string, display: boolean}} props
 */
export function Formula({ formula, display }) {
  const element = useRef(null);
  const [ready, setReady] = useState(temml !== null);
  const [valid, setValid] = useState(true);
  useEffect(() => {
    let wanted = true;
    if (!ready) loaded().then(() => wanted && setReady(true));
    return () => (wanted = false);
  }, []);
  useLayoutEffect(() => {
    if (ready) setValid(write(formula, display, element.current));
  }, [ready, formula, display]);
  const scroll = display ? { tabIndex: 0, role: "group" } : {};
  return h(
    "span",
    { class: display ? "md-formula md-display" : "md-formula" },
    h("span", { ref: element, hidden: !(ready && valid), class: "md-math", ...scroll }),
    ready && valid ? null : h("code", null, formula.trim()),
  );
}
