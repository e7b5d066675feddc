/** What a new chat shows before its first message, and what the first start says. */

import { html } from "edgerun/preact";

import { Icon } from "../icons.js";
import { attempt, changeSettings, modelOf, set, useStore } from "../store.js";
import { strings } from "../strings.js";

function Introduction({ bundled }) {
  return html`<section class="introduction" aria-label=${strings.welcome.introduction}>
    <p>${strings.welcome.what}</p>
    <p>${strings.welcome.local}</p>
    ${bundled && html`<p>${strings.welcome.bundled}</p>`}
    <div class="introduction-actions">
      ${bundled && html`<a class="button primary" href="#/models"><${Icon} name="model" />${strings.welcome.getModel}</a>`}
      <button type="button" class="button" onClick=${() => attempt(() => changeSettings({ introduced: true }))}>
        ${strings.welcome.understood}
      </button>
    </div>
  </section>`;
}

/** The empty chat: a greeting, the introduction until it is dismissed, and prompts that suit the model. */
export function Welcome() {
  const loaded = useStore((state) => state.loaded);
  const introduced = useStore((state) => state.settings.introduced);
  const model = useStore(() => modelOf(null));
  if (!loaded) return html`<p class="quiet" role="status">${strings.chat.loading}</p>`;
  const examples = model?.bundled ? strings.welcome.shellExamples : strings.welcome.chatExamples;
  return html`<div class="welcome">
    <h2>${model?.bundled ? strings.welcome.greetingShell : strings.welcome.greeting}</h2>
    ${!introduced && html`<${Introduction} bundled=${model?.bundled} />`}
    ${introduced && model?.bundled && html`<p class="quiet">${strings.welcome.bundledShort} <a href="#/models">${strings.welcome.getModel}</a></p>`}
    <ul class="examples" aria-label=${strings.welcome.examples}>
      ${examples.map(
        (text) =>
          html`<li key=${text}><button type="button" class="example" onClick=${() => set({ example: text })}>${text}</button></li>`,
      )}
    </ul>
  </div>`;
}
