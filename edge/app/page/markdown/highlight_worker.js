/** Worker that colours code, so that code which takes long does not hold up the page. It says `true` when it begins. */

import hljs from "../vendor/highlight.js/core.min.js";

const loaded = new Map();

/** Loads a language, and those that it may contain. */
function language(name, inside) {
  if (!loaded.has(name)) {
    const loading = import(`../vendor/highlight.js/languages/${name}.min.js`).then(({ default: grammar }) =>
      hljs.registerLanguage(name, grammar),
    );
    loaded.set(name, Promise.all([loading, ...inside.map((other) => language(other, []))]));
  }
  return loaded.get(name);
}

self.onmessage = async ({ data: { code, name, inside } }) => {
  try {
    await language(name, inside);
    self.postMessage(true);
    self.postMessage(hljs.highlight(code, { language: name, ignoreIllegals: true }).value);
  } catch {
    self.postMessage(null);
  }
};
