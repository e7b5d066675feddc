/** What a new chat shows before its first message. */

import { html, useState } from "edgerun/preact";

import { Icon } from "../icons.js";
import { attempt, modelOf, openConversation, sendMessage, state, useStore } from "../store.js";
import { strings } from "../strings.js";

/** The empty chat: what it is, where a chat model comes from if there is none, and examples that are sent by a click. */
export function Welcome() {
  const loaded = useStore((current) => current.loaded);
  const helper = useStore(() => modelOf(null)?.bundled);
  const alone = useStore((current) => current.models.every((model) => model.bundled));
  const [sending, setSending] = useState(false);
  if (!loaded) return html`<p class="quiet" role="status">${strings.chat.loading}</p>`;
  const send = async (text) => {
    setSending(true);
    const sent = await attempt(() => sendMessage(null, text, []));
    setSending(false);
    if (sent && state.route.page === "chat" && state.route.id === null) openConversation(sent);
  };
  return html`<div class="welcome">
    <h2>${helper ? strings.welcome.greetingShell : strings.welcome.greeting}</h2>
    <p class="quiet">${helper ? strings.welcome.aboutShell : strings.welcome.about}</p>
    <ul class="examples" aria-label=${strings.welcome.examples}>
      ${(helper ? strings.welcome.shellExamples : strings.welcome.chatExamples).map(
        (text) =>
          html`<li key=${text}><button type="button" class="example" disabled=${sending} onClick=${() => send(text)}>${text}</button></li>`,
      )}
    </ul>
    ${alone && html`<p><a class="button primary" href="#/models"><${Icon} name="model" />${strings.welcome.getModel}</a></p>`}
  </div>`;
}
