/** The parts of documents that an answer was given to read: each opens where its source is pressed. */

import { html } from "edgerun/preact";

import { strings } from "../strings.js";

export function Passages({ passages }) {
  return html`<section class="passages" aria-label=${strings.message.passages}>
    <p class="call-label">${strings.message.passages}</p>
    <ol>
      ${passages.map(
        ({ source, line, text }, index) =>
          html`<li key=${index}>
            <details>
              <summary>${source}:${line}</summary>
              <pre class="call-text" tabindex="0" aria-label=${source}>${text}</pre>
            </details>
          </li>`,
      )}
    </ol>
  </section>`;
}
