/** Settings of one conversation: title, folder, system prompt, sampling, presets, export. */

import { html, useState } from "edgerun/preact";

import { deletePreset, exportUrl, savePreset } from "../api.js";
import { attempt, changeConversation, conversationOf, modelOf, notify, refreshState, state, useStore } from "../store.js";
import { strings } from "../strings.js";
import { Dialog, PromptDialog } from "./dialogs.js";
import { ToolChoice } from "./tool_choice.js";

/** Fields of `GenerateOptions` with the numbers that they accept. */
const FIELDS = [
  { name: "temperature", min: 0, max: 5, step: 0.05 },
  { name: "top_p", min: 0, max: 1, step: 0.01, above: true },
  { name: "top_k", min: 0, max: 1000, step: 1 },
  { name: "min_p", min: 0, max: 1, step: 0.01 },
  { name: "repeat_penalty", min: 0, max: 5, step: 0.01, above: true },
  { name: "presence_penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", min: -2, max: 2, step: 0.1 },
  { name: "max_tokens", min: 1, max: 1000000, step: 1 },
  { name: "seed", min: 0, max: 4294967295, step: 1 },
];

/** What is wrong with the text of a field, or null. */
function faultOf({ min, max, step, above }, text) {
  if (!text.trim()) return null;
  const number = Number(text.replace(",", "."));
  const whole = step === 1;
  if (!Number.isFinite(number) || (whole && !Number.isInteger(number))) {
    return whole ? strings.conversation.notWhole : strings.conversation.notNumber;
  }
  if (number < min || number > max || (above && number === min)) return strings.conversation.outOfRange(min, max, above);
  return null;
}

function textsOf(sampling) {
  const texts = Object.fromEntries(FIELDS.map(({ name }) => [name, sampling[name] == null ? "" : String(sampling[name])]));
  const stop = sampling.stop ?? [];
  const lines = (typeof stop === "string" ? [stop] : stop).map((line) => line.replaceAll("\n", "\\n"));
  return { ...texts, stop: lines.join("\n"), overflow: sampling.overflow ?? "" };
}

function samplingOf(texts) {
  const sampling = {};
  for (const { name } of FIELDS) if (texts[name].trim()) sampling[name] = Number(texts[name].replace(",", "."));
  const stop = texts.stop.split("\n").filter((line) => line);
  if (stop.length) sampling.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
  if (texts.overflow) sampling.overflow = texts.overflow;
  return sampling;
}

function Field({ field, value, standard, onChange }) {
  const fault = faultOf(field, value);
  const words = strings.conversation.fields[field.name];
  const note = `note-${field.name}`;
  return html`<label class="field">
    <span>${words.label}</span>
    <input
      inputmode=${field.step === 1 ? "numeric" : "decimal"}
      autocomplete="off"
      value=${value}
      placeholder=${standard == null ? words.standard : strings.conversation.modelDefault(standard)}
      aria-invalid=${fault !== null}
      aria-describedby=${note}
      onInput=${(event) => onChange(event.target.value)}
    />
    <small id=${note} class=${fault ? "fault" : "quiet"}>${fault ?? words.about}</small>
  </label>`;
}

function Presets({ system, sampling, onApply }) {
  const presets = useStore((current) => current.presets);
  const [chosen, setChosen] = useState("");
  const [naming, setNaming] = useState(false);
  const apply = () => {
    const preset = presets.find((item) => item.name === chosen);
    if (preset) onApply(preset);
  };
  const save = (name) =>
    attempt(async () => {
      await savePreset(name, { system, sampling });
      await refreshState();
      setChosen(name);
    });
  const remove = () =>
    attempt(async () => {
      const preset = presets.find((item) => item.name === chosen);
      await deletePreset(chosen);
      await refreshState();
      setChosen("");
      const undo = async () => {
        await savePreset(preset.name, { system: preset.system, sampling: preset.sampling });
        await refreshState();
      };
      notify({
        text: strings.conversation.presetDeleted(preset.name),
        action: { label: strings.notices.undo, run: () => attempt(undo) },
      });
    });
  return html`<fieldset class="presets">
    <legend>${strings.conversation.presets}</legend>
    <select aria-label=${strings.conversation.preset} value=${chosen} onChange=${(event) => setChosen(event.target.value)}>
      <option value="">${presets.length ? strings.conversation.choosePreset : strings.conversation.noPresets}</option>
      ${presets.map((preset) => html`<option key=${preset.name} value=${preset.name}>${preset.name}</option>`)}
    </select>
    <button type="button" class="button" disabled=${!chosen} onClick=${apply}>${strings.conversation.apply}</button>
    <button type="button" class="button" disabled=${!chosen} onClick=${remove}>${strings.conversation.deletePreset}</button>
    <button type="button" class="button" onClick=${() => setNaming(true)}>${strings.conversation.saveAsPreset}</button>
    ${naming &&
    html`<${PromptDialog}
      title=${strings.conversation.saveAsPreset}
      label=${strings.conversation.presetName}
      value=${chosen}
      save=${strings.common.save}
      choices=${presets.map((preset) => preset.name)}
      onSave=${save}
      onClose=${() => setNaming(false)}
    />`}
  </fieldset>`;
}

/** Settings of the conversation `id`, once it is there; for null, what a new one begins with. */
export function ConversationSettings({ id, onClose }) {
  const conversation = useStore(() => (id === null ? null : conversationOf(id)));
  if (conversation === undefined) return null;
  return html`<${SettingsForm} conversation=${conversation} onClose=${onClose} />`;
}

function SettingsForm({ conversation, onClose }) {
  const id = conversation?.id ?? null;
  const before = conversation ?? state.fresh;
  const model = useStore(() => modelOf(conversation));
  const folders = useStore((current) => current.folders);
  const [title, setTitle] = useState(before.title ?? "");
  const [folder, setFolder] = useState(before.folder ?? "");
  const [system, setSystem] = useState(before.system ?? "");
  const [texts, setTexts] = useState(() => textsOf(before.sampling ?? {}));
  const [tools, setTools] = useState({ chosen: before.tools ?? [], allowed: before.allowed_tools ?? [] });
  const [documents, setDocuments] = useState((before.documents ?? []).join("\n"));
  const wrong = FIELDS.some((field) => faultOf(field, texts[field.name]));
  const defaults = model?.sampling_defaults ?? {};
  const save = async (event) => {
    event.preventDefault();
    if (wrong) {
      event.target.querySelector("[aria-invalid=true]").focus();
      return;
    }
    const changes = { folder: folder.trim() || null, system, sampling: samplingOf(texts), tools: tools.chosen };
    changes.documents = documents.split("\n").map((path) => path.trim()).filter((path) => path);
    if (id !== null) changes.allowed_tools = tools.allowed;
    if (title.trim() !== (before.title ?? "")) changes.title = title.trim();
    const saved = await attempt(async () => {
      await changeConversation(id, changes);
      return true;
    });
    if (saved) onClose();
  };
  const apply = (preset) => {
    setSystem(preset.system ?? "");
    setTexts(textsOf(preset.sampling ?? {}));
  };
  return html`<${Dialog} title=${strings.conversation.title} onClose=${onClose} className="dialog-wide">
    <form class="stack" onSubmit=${save} noValidate>
      <div class="field-row">
        <label class="field"
          ><span>${strings.conversation.name}</span>
          <input data-autofocus value=${title} maxlength="200" placeholder=${strings.conversation.nameByItself} onInput=${(event) => setTitle(event.target.value)} />
        </label>
        <label class="field"
          ><span>${strings.conversation.folder}</span>
          <input value=${folder} maxlength="100" list="folders-known" placeholder=${strings.conversation.noFolder} onInput=${(event) => setFolder(event.target.value)} />
        </label>
        <datalist id="folders-known">${folders.map((name) => html`<option value=${name} />`)}</datalist>
      </div>
      <label class="field"
        ><span>${strings.conversation.system}</span>
        <textarea rows="5" value=${system} placeholder=${strings.conversation.systemHint} onInput=${(event) => setSystem(event.target.value)}></textarea>
      </label>
      <label class="field"
        ><span>${strings.conversation.documents}</span>
        <textarea rows="2" spellcheck="false" value=${documents} onInput=${(event) => setDocuments(event.target.value)}></textarea>
        <small class="quiet">${strings.conversation.documentsHint}</small>
      </label>
      <fieldset>
        <legend>${strings.conversation.sampling}</legend>
        <p class="quiet">${strings.conversation.samplingHint}</p>
        <div class="field-grid">
          ${FIELDS.map(
            (field) =>
              html`<${Field}
                key=${field.name}
                field=${field}
                value=${texts[field.name]}
                standard=${defaults[field.name]}
                onChange=${(text) => setTexts((all) => ({ ...all, [field.name]: text }))}
              />`,
          )}
        </div>
        <label class="field"
          ><span>${strings.conversation.stop}</span>
          <textarea rows="2" value=${texts.stop} onInput=${(event) => setTexts((all) => ({ ...all, stop: event.target.value }))}></textarea>
          <small class="quiet">${strings.conversation.stopHint}</small>
        </label>
        <label class="field"
          ><span id="label-overflow">${strings.conversation.overflow}</span>
          <select
            value=${texts.overflow}
            aria-labelledby="label-overflow"
            aria-describedby="note-overflow"
            onChange=${(event) => setTexts((all) => ({ ...all, overflow: event.target.value }))}
          >
            ${strings.conversation.overflowChoices.map(([value, words]) => html`<option key=${value} value=${value}>${words}</option>`)}
          </select>
          <small id="note-overflow" class="quiet">${strings.conversation.overflowHint}</small>
        </label>
      </fieldset>
      <${ToolChoice}
        chosen=${tools.chosen}
        allowed=${tools.allowed}
        onChange=${(chosen, allowed) => setTools({ chosen, allowed })}
      />
      <${Presets} system=${system} sampling=${wrong ? {} : samplingOf(texts)} onApply=${apply} />
      ${id !== null &&
      html`<p class="exports">
        ${strings.conversation.export}${" "}
        <a class="button small" href=${exportUrl(id, "markdown")} download>${strings.conversation.markdown}</a>
        <a class="button small" href=${exportUrl(id, "json")} download>${strings.conversation.json}</a>
      </p>`}
      <div class="dialog-actions sticky">
        <button type="button" class="button" onClick=${onClose}>${strings.common.cancel}</button>
        <button class="button primary">${strings.common.save}</button>
      </div>
    </form>
  <//>`;
}
