/** All English of the page, by view; functions where something is put in. */

/** A number with a comma between thousands. `toLocaleString` would make such a formatter at every call. */
const digits = new Intl.NumberFormat("en").format;
const count = (number, one, many) => `${digits(number)} ${number === 1 ? one : many}`;
const turns = (number) => count(number, "turn", "turns");

function size(bytes) {
  const shown = (number) => Number(number.toFixed(number < 99.95 ? 1 : 0));
  if (bytes < 1000) return `${bytes} bytes`;
  if (bytes < 999.5e3) return `${shown(bytes / 1e3)} kB`;
  if (bytes < 999.5e6) return `${shown(bytes / 1e6)} MB`;
  return `${shown(bytes / 1e9)} GB`;
}

/** A probability from 0 to 1; one that is not certain is never shown as 100 %. */
function percent(probability) {
  const value = 100 * probability;
  if (value > 99.95) return value < 100 ? "99.9\u00a0%" : "100\u00a0%";
  if (value < 0.05) return "<\u00a00.1\u00a0%";
  return `${value < 10 || value > 99 ? value.toFixed(1) : Math.round(value)}\u00a0%`;
}

function seconds(value) {
  if (value < 0.1) return `${Math.round(value * 1000)} ms`;
  return value < 10 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

function duration(value) {
  if (value < 60) return `${Math.ceil(value)} s`;
  if (value < 3600) return `${Math.ceil(value / 60)} min`;
  return `${Math.floor(value / 3600)} h ${Math.ceil((value % 3600) / 60)} min`;
}

const parameters = (number) => (number < 0.95e9 ? `${Math.round(number / 1e6)} million` : `${(number / 1e9).toFixed(1)} billion`);

function quality(kl) {
  if (kl < 0.005) return "Practically the original";
  if (kl < 0.05) return "Hardly different from the original";
  if (kl < 0.15) return "Slightly worse than the original";
  if (kl < 0.5) return "Clearly worse than the original";
  return "Poor: expect nonsense at times";
}

export const strings = {
  common: {
    cancel: "Cancel",
    close: "Close",
    copied: "Copied",
    copy: "Copy",
    save: "Save",
    size,
    tokens: (number) => count(number, "token", "tokens"),
    tokensAbout: "The tokens of the answer's text; the token that ends an answer is not counted.",
  },
  announcements: {
    complete: "The answer is finished.",
    stopped: "The answer was stopped.",
    length: "The answer has reached its limit of tokens.",
    failed: "The answer has failed.",
    interrupted: "The answer was interrupted.",
  },
  calls: {
    always: "Always in this conversation",
    arguments: "Arguments",
    asks: (name) => `The model asks to call ${name}. Run or refuse it.`,
    label: (name) => `Call of ${name}`,
    refuse: "Refuse",
    result: "Result",
    run: "Run",
    states: {
      waiting: "waits for you",
      running: "running …",
      done: "done",
      failed: "failed",
      refused: "refused",
      open: "not made",
    },
  },
  chat: {
    loading: "Loading …",
    newTitle: "New chat",
    settings: "Settings of this conversation",
    skip: "Skip to writing a message",
    toEnd: "Jump to the latest",
    trimmed: (number) =>
      `The model does not see the messages above any more: ${turns(number)} left out to make room in its context.`,
  },
  composer: {
    attach: "Attach files",
    attachments: "Attached files",
    camera: "Take a picture",
    drop: "Drop files to attach them",
    hintCtrlEnter: "Ctrl+Enter sends",
    hintEnter: "Enter sends, Shift+Enter begins a line",
    inPassages: "too long: what fits the question is read",
    label: "Write a message",
    notText: (name) => `${name} is not a text file in UTF-8, so it cannot be attached`,
    placeholder: "Write a message",
    removeFile: (name) => `Remove ${name}`,
    send: "Send",
    stop: "Stop the answer (Esc)",
    take: "Take it",
    stopFirst: "The model is still answering. Stop it with Esc, or wait until it has finished.",
    textLabel: "Message",
    tooLarge: (name, bytes, most) => `${name} has ${size(bytes)}, more than the ${size(most)} that can be taken`,
  },
  comparison: {
    chatPrompt: "Write a Python function that reads a CSV file and returns the rows as dictionaries. Then show how to call it.",
    counts: (side) =>
      [
        count(side.tokens, "token", "tokens"),
        side.drafted > 0 && `${digits(side.accepted)} of ${count(side.drafted, "draft token", "draft tokens")} accepted`,
        side.passes !== null && count(side.passes, "pass", "passes"),
      ]
        .filter(Boolean)
        .join(" · "),
    drafted: "With drafting",
    from: "Prompt",
    how: "How this is measured",
    howAbout:
      "One engine writes both answers, in alternation: whichever has used less time gets the processor to itself for the next tenth of a second. So both have the same time at every moment, and what else the machine does slows both. The rate counts the tokens after the first one; reading the prompt is left out. Drafters keep what they have learned from earlier answers, as they do in a chat, so a prompt that was answered before is drafted better than a new one.",
    introduction:
      "Drafting proposes several tokens at once and verifies them in one pass of the model: the same text in less time, where the proposals are good. Here both ways write the same answer side by side.",
    length: "Longest answer",
    loading: "Loading the model …",
    model: "Model",
    plain: "Without drafting",
    prompt: "Prompt to answer",
    rate: "tokens/s",
    shellPrompt: "find all files larger than 100 MB that were changed in the last week and sort them by size",
    start: "Compare",
    stop: "Stop",
    stopped: "Stopped.",
    textOf: (name) => `Text ${name.toLowerCase()}`,
    typed: "As typed below",
  },
  connection: {
    lost: {
      what: "The edge-run app has ended; start it again.",
      more: "Everything so far is kept; this page goes on by itself when the app is back.",
    },
    refused: {
      what: "The edge-run app does not know this browser any more.",
      more: "Run edge-run app, and open the address that it prints.",
    },
  },
  conversation: {
    apply: "Apply",
    choosePreset: "Choose a preset",
    deletePreset: "Delete",
    export: "Export this conversation as",
    fields: {
      temperature: { label: "Temperature", standard: "the model's", about: "0 always takes the likeliest token." },
      top_p: { label: "Top-p", standard: "the model's", about: "Keeps the likeliest tokens up to this probability." },
      top_k: { label: "Top-k", standard: "the model's", about: "Keeps this many tokens; 0 keeps all." },
      min_p: { label: "Min-p", standard: "the model's", about: "Drops tokens below this share of the best one." },
      repeat_penalty: { label: "Repeat penalty", standard: "the model's", about: "Above 1, repeating gets less likely." },
      presence_penalty: { label: "Presence penalty", standard: "0", about: "Lowers tokens that have occurred." },
      frequency_penalty: { label: "Frequency penalty", standard: "0", about: "Lowers tokens by how often they occurred." },
      max_tokens: { label: "Longest answer", standard: "up to the context", about: "In tokens." },
      seed: { label: "Seed", standard: "random", about: "The same seed gives the same answer." },
    },
    folder: "Folder",
    json: "JSON",
    markdown: "Markdown",
    modelDefault: (value) => `${value} (the model's)`,
    name: "Title",
    nameByItself: "Named after the first message",
    noFolder: "None",
    noPresets: "No presets yet",
    notNumber: "This must be a number.",
    notWhole: "This must be a whole number.",
    overflow: "Longer than the context",
    overflowChoices: [
      ["", "As the app was started; without --overflow, an answer begins without the oldest turns"],
      ["trim", "Leave out the oldest turns, also while an answer is written"],
      ["window", "Keep the system prompt and the newest text, also while an answer is written"],
      ["error", "Begin no answer, and say so"],
    ],
    overflowHint: "What happens when the conversation no longer fits what the model can read at once.",
    outOfRange: (min, max, above) => `This must be ${above ? "above" : "from"} ${min} ${above ? "and at most" : "to"} ${max}.`,
    preset: "Preset",
    presetDeleted: (name) => `Deleted the preset “${name}”`,
    presetName: "Name of the preset",
    presets: "Presets: a system prompt with sampling",
    sampling: "Sampling",
    samplingHint: "An empty field takes the model's own default.",
    saveAsPreset: "Save as preset …",
    stop: "Stop sequences",
    stopHint: "One a line; \\n stands for a line break. The answer ends before them.",
    documents: "Documents",
    documentsHint: "Paths of folders and files on this machine, one a line. What fits a question goes into its prompt.",
    system: "System prompt",
    systemHint: "What the model is told before the first message",
    title: "Settings of this conversation",
  },
  downloads: {
    amount: (download) =>
      [
        download.total > 0 ? `${size(download.received)} of ${size(download.total)}` : download.received > 0 && size(download.received),
        download.bytes_per_second && `${size(Math.round(download.bytes_per_second))}/s`,
        download.seconds_left != null && `${duration(download.seconds_left)} left`,
      ]
        .filter(Boolean)
        .join(" · "),
    another: "Another model of the hub",
    anotherAbout:
      "A repository with ONNX files, such as one of onnx-community. Without a variant, the one that suits this machine is taken. Checkpoints without ONNX files can be exported.",
    arrived: (id) => `${id} was downloaded and can be used`,
    cancel: "Cancel",
    dismiss: (id) => `Take ${id} off the list of downloads`,
    download: "Download",
    found: ({ downloads, bytes }) =>
      [
        `${count(downloads, "download", "downloads")} in 30 days`,
        bytes ? `${size(bytes)} in all variants together` : "size unknown",
      ].join(" · "),
    foundCount: (number) => (number ? `Found ${count(number, "model", "models")}, the most downloaded first.` : "Nothing found"),
    hasFailed: (id, error) => `The download of ${id} failed: ${error}`,
    pause: "Pause",
    progressOf: (id) => `Progress of ${id}`,
    results: "Models of the hub",
    resume: "Resume",
    search: "Search the hub by name",
    searchAbout: "Your words go to the hub when you press the button. Only language models with ONNX files are listed.",
    searchButton: "Search",
    searchExample: "qwen3 instruct",
    searching: "Searching …",
    stalled: "no data for a while; it goes on when the connection does",
    states: { queued: "waiting", downloading: "downloading", paused: "paused", done: "done", failed: "failed" },
    title: "Downloads",
  },
  errors: {
    unreachable: "The edge-run app does not answer; start it again.",
    unreadable: "The edge-run app has sent an answer that cannot be read.",
  },
  markdown: {
    code: (language) => (language ? `Code: ${language}` : "Code"),
    copied: "Copied",
    copy: "Copy",
    direction: "contains characters that change the direction of text",
    imageNotLoaded: "image not loaded",
    mermaid: "Mermaid diagram, shown as text",
    table: "Table",
    task: (done) => (done ? "done" : "to do"),
    tooLarge: "Shown as plain text, because it is too large or too deeply nested to be formatted.",
  },
  exactness: {
    accepted: (row) => `${digits(row.accepted)} of ${digits(row.drafted)}`,
    again: "Check again",
    cancelled: "The check was cancelled.",
    columns: ["How tokens are chosen", "Texts", "Identical", "Near ties", "Wrong", "Draft tokens accepted"],
    counts: "Texts with drafting, compared with the same texts without",
    introduction:
      "Drafting must not change what a model writes. This checks it on this machine: the model answers prompts with drafts of every kind, good and bad ones, and each text is compared with the one that is written without drafts.",
    limits: { 1: "Quick: one prompt of each kind", 3: "Usual: three prompts of each kind", 8: "Thorough: eight prompts of each kind" },
    measured: (entry) =>
      `Checked on ${new Date(entry.measured * 1000).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" })} with ${count(entry.prompts, "prompt", "prompts")} on ${entry.device}. Other hardware or another version of ONNX Runtime may differ.`,
    model: "Model",
    noise: "How much wide passes differ",
    noiseAbout: "Largest difference of a logit between a pass over several tokens and passes over one token each.",
    none: "This model has not been checked on this machine yet.",
    running: "The exactness check",
    stage: (check) => `${check.stage || "starting"}: ${Math.round(100 * check.fraction)} %`,
    start: "Check",
    thoroughness: "Thoroughness",
    trees: (value) => `trees of draft tokens: ${value === 0 ? "none" : value.toPrecision(2)}`,
    width: (width, value) => `${count(Number(width), "token", "tokens")}: ${value === 0 ? "none" : value.toPrecision(2)}`,
  },
  exports: {
    axis: "KL from the original",
    better: "Closer to the original",
    cancelLabel: (name) => `Cancel the export of ${name}`,
    curve: "Plans by the memory of their weights and their distance from the original; the slider below chooses one",
    dismiss: "Dismiss",
    dismissLabel: (name) => `Take the export of ${name} off the list`,
    exportPlan: "Export this one",
    finished: (name) => `${name} was exported and can be used`,
    folder: (path) => `Exported models are kept in ${path}.`,
    hasFailed: (name, error) => `The export of ${name} failed: ${error}`,
    how: "Weights",
    introduction:
      "An export turns a checkpoint of a model's makers into a model for edge-run, with weights of 2 to 8 bits. Fewer bits are smaller and faster, and further from the original. Measured first, each matrix gets the bits that it needs.",
    jobAbout: (job) => (job.bits ? `${job.source}, all weights with ${job.bits} bits` : `${job.source}, a plan of mixed bits`),
    jobs: "Exports",
    kl: (value) => String(Number(value.toPrecision(1))),
    larger: "Larger",
    measure: "Measure, then choose",
    measured: (name) => `The plans for ${name} are measured: choose one`,
    missing: (name) => `Exporting needs the package ${name}. Install it, and start the app again:`,
    name: "Name of the model",
    nameStandard: "as the source",
    planAbout: (plan, plans) => {
      const most = plans[plans.length - 1];
      return `A pass reads ${size(plan.bytes_read)} of weights for each token, ${Math.round((100 * plan.bytes_read) / most.bytes_read)} % of the largest plan's. On most machines the speed of writing grows by the same factor.`;
    },
    planQuality: (plan) => `${quality(plan.kl)} (mean KL ${plan.kl < 0.001 ? plan.kl.toExponential(1) : plan.kl.toPrecision(2)})`,
    planSize: (plan) => `${size(plan.bytes_read)}, ${plan.bits_per_weight.toFixed(1)} bits per weight as read.`,
    planText: (plan) => `${size(plan.bytes_read)}, ${plan.bits_per_weight.toFixed(1)} bits per weight as read. ${quality(plan.kl)}`,
    progressOf: (name) => `Progress of the export of ${name}`,
    result: (result) =>
      `${size(result.bytes)} on disk, ${result.bits_per_weight_in_file.toFixed(2)} bits per weight in the file${result.bits_per_weight_read === null ? "" : `, ${result.bits_per_weight_read.toFixed(2)} as read per token`}${result.kl === null ? "" : `. ${quality(result.kl)} (mean KL ${result.kl.toPrecision(2)})`}.`,
    slider: "Size and quality",
    smaller: "Smaller",
    source: "Checkpoint",
    sourceAbout: "A folder on this machine with config.json and safetensors, or org/name on the hub, which is downloaded first.",
    stage: (stage) => stage || "waiting for the process",
    start: "Export",
    states: {
      queued: "waiting",
      measuring: "measuring",
      choosing: "choose a plan",
      exporting: "exporting",
      done: "done",
      failed: "failed",
      cancelled: "cancelled",
    },
    toModels: "Show the models",
    ways: [
      ["", "Measured first, then a choice between size and quality; takes minutes to an hour"],
      ["8", "8 bits for all: large, practically the original; right away"],
      ["4", "4 bits for all: half of that, somewhat worse; right away"],
    ],
  },
  message: {
    anotherModel: "Regenerate with another model …",
    anotherModelTitle: "Regenerate with",
    attachments: "Attached files",
    branches: "Branches",
    branchOf: (at, all) => `Branch ${at} of ${all}`,
    continue: "Continue",
    copy: "Copy message",
    delete: "Delete, with what follows",
    edit: "Edit",
    editAnswerHint: "Esc cancels",
    editHint: "Ctrl+Enter saves and answers, Esc cancels",
    editLabel: "Text of the message",
    failed: "The answer has failed.",
    interrupted: "Interrupted: the app ended while this was written.",
    justSave: "Just save",
    label: (name) => `Message of ${name}`,
    callLimit: "The limit of rounds of calls is reached.",
    length: "The limit of tokens is reached.",
    model: "Model",
    more: "More actions",
    nextBranch: "Next branch",
    noPassage: "No passage of the documents fits the question.",
    passages: "From the documents",
    previousBranch: "Previous branch",
    regenerate: "Regenerate",
    retry: "Retry",
    saveAndAnswer: "Save as branch and answer",
    saveAsBranch: "Save as branch",
    showAll: (characters) => `Show all ${digits(characters)} characters`,
    stage: (stage) =>
      ({
        "loading the model": "Loading the model",
        "measuring the speed of this model": "Measuring once how fast this model is here",
        "reading the prompt": "Reading the conversation",
        "starting the tools": "Starting the tools",
      })[stage] ?? stage,
    statistics: (numbers) =>
      [
        count(numbers.tokens, "token", "tokens"),
        numbers.tokens_per_second != null && `${numbers.tokens_per_second.toFixed(1)} tokens/s`,
        numbers.first_token_s != null && `first token after ${seconds(numbers.first_token_s)}`,
        numbers.int8_prompt_tokens > 0 && "prompt read with int8 weights",
      ]
        .filter(Boolean)
        .join(" · "),
    stopped: "Stopped.",
    smallTalk: "This model writes shell commands only, whatever it is asked. Try: list open ports.",
    thinking: (elapsed) => (elapsed ? `Thinking for ${elapsed} s …` : "Thinking …"),
    thought: (words, elapsed) =>
      elapsed ? `Thought for ${elapsed} s (${count(words, "word", "words")})` : `Reasoning (${count(words, "word", "words")})`,
    toolsIgnored: "This model has no form for calls of tools, so it was not told of any.",
    trimmed: "not seen by the model",
    waiting: "Waiting for the model",
    writeSeveral: (answers) => `Write ${digits(answers)} answers`,
    you: "You",
  },
  meter: {
    cut: "The oldest text is left out",
    explanation: ({ tokens, context, reserve }) =>
      `${digits(tokens)} of ${digits(context)} tokens of the model's context are used, with what is typed.` +
      ` ${digits(reserve ?? 0)} are kept free for the answer.`,
    label: "Tokens of the context in use",
    nearlyFull: "The context is nearly full",
    numbers: (tokens, context) => `${digits(tokens)} / ${digits(context)}`,
    trims: (number) => `The oldest ${number === 1 ? "turn" : turns(number)} will be left out`,
  },
  models: {
    advanced: "Advanced",
    about: (model) =>
      `${parameters(model.parameters)} parameters · about ${size(model.disk_bytes)} to download · ${model.languages} · ${model.licence}`,
    brief: (model) =>
      [
        `${size(model.memory_bytes)} of memory`,
        model.tokens_per_second === null ? "speed not measured yet" : `${model.tokens_per_second.toFixed(1)} tokens/s`,
        model.bundled && "shell helper",
      ]
        .filter(Boolean)
        .join(" · "),
    bundled: "bundled",
    download: (bytes) => `Download ${size(bytes)}`,
    downloadLabel: (title) => `Download ${title}`,
    resumeLabel: (title) => `Resume the download of ${title}`,
    downloading: "Downloading …",
    facts: (model) => [
      ["On disk", size(model.disk_bytes)],
      [
        "Memory",
        model.context && model.cache_bytes_per_token ? `${size(model.weight_bytes)} to ${size(model.memory_bytes)}` : size(model.weight_bytes),
        model.context && model.cache_bytes_per_token
          ? `Weights ${size(model.weight_bytes)}, and ${size(model.cache_bytes_per_token)} of KV cache for each of up to ${digits(model.context)} tokens`
          : "The weights; the KV cache comes on top",
      ],
      ["Context", model.context ? count(model.context, "token", "tokens") : "unknown"],
      ["Speed", model.tokens_per_second === null ? "not measured yet" : `${model.tokens_per_second.toFixed(1)} tokens/s`, "Median of the last answers on this machine"],
    ],
    getMore: "Get more models",
    here: "on this machine",
    inUse: "In use: stop its answers first",
    load: "Load",
    loadLabel: (title) => `Load ${title} into memory`,
    loaded: "in memory",
    loading: (event) => (event?.fraction > 0 ? `${event.stage}: ${Math.round(100 * event.fraction)} %` : "Loading …"),
    more: (fitting, others) =>
      [fitting && `${fitting} more that ${fitting === 1 ? "fits" : "fit"}`, others && `${others} too large for the memory that is free now`]
        .filter(Boolean)
        .join(", "),
    none: "No model",
    onThisMachine: "On this machine",
    pages: { models: "Models", export: "Export a model", compare: "Compare speeds", exactness: "Exactness report" },
    pagesLabel: "About models",
    recommended: "Worth downloading for this machine",
    recommendedAbout: (bytes) => `${size(bytes)} of memory are free now. Sizes are approximate; memory is counted for a conversation of 4,096 tokens.`,
    remove: "Remove",
    removeAbout: (model) => `Its files are deleted, which frees ${size(model.disk_bytes)}. Conversations with it are kept.`,
    removeLabel: (title) => `Remove ${title} …`,
    removeTitle: (title) => `Remove ${title}?`,
    switcherLabel: (name) => `Model: ${name}. Choose another`,
    tabs: { models: "Models", export: "Export", compare: "Compare", exactness: "Exactness" },
    unload: "Unload",
    unloadLabel: (title) => `Unload ${title} from memory`,
  },
  notices: {
    conversationDeleted: (title) => `Deleted “${title}”`,
    dismiss: "Dismiss",
    label: "Notices",
    messageDeleted: "Deleted the message with what follows",
    undo: "Undo",
  },
  palette: {
    action: "Action",
    conversation: "Conversation",
    deleted: "Deleted conversations",
    found: (number) => (number ? `Found ${count(number, "entry", "entries")}` : "Nothing found"),
    hint: "Searches actions, the titles of conversations, and all messages of every branch.",
    label: "Words to search for",
    message: "Message",
    placeholder: "Search conversations and actions",
    results: "Results",
    theme: "Light or dark theme",
    title: "Search and actions",
  },
  settings: {
    about: "About",
    answers: "Answers",
    enter_sends: {
      label: "Sending a message",
      choices: { true: "Enter sends, Shift+Enter begins a line", false: "Ctrl+Enter sends, Enter begins a line" },
    },
    exportAll: "Export all conversations",
    files: "Conversations as files",
    filesAbout: "JSON keeps everything, with all branches. Markdown is for reading; it can be imported too.",
    font_size: { label: "Font size", value: (pixels) => `${pixels} px` },
    import: "Import …",
    imported: (number) => `Imported ${count(number, "conversation", "conversations")}`,
    login: {
      title: "Start",
      label: "Start the app when you log in",
      about: "It runs in the background then, and edge-run app opens its page. Loaded models take memory; none is loaded at first.",
      files: (enabled) => (enabled ? "These files do that, and switching it off removes them:" : "Switching it on writes these files, and nothing else:"),
    },
    look: "Look",
    machine: ({ system, cores, memory_bytes: memory }) =>
      [system, cores && count(cores, "core", "cores"), memory && `${Math.round(memory / 2 ** 30)} GB of memory`]
        .filter(Boolean)
        .join(" · "),
    open: "Open",
    show_statistics: {
      label: "Show statistics under answers",
      about: "Tokens, tokens per second and the time to the first token.",
    },
    theme: { label: "Theme", choices: { system: "As the system", light: "Light", dark: "Dark" } },
    title: "Settings",
    token_details: {
      label: "Keep the details of every token",
      about:
        "Answers can then show each token's probability, its alternatives and how it was drafted. It costs about half a millisecond a token with a vocabulary of 150,000, and some space on disk.",
    },
    usage: "Use of the models",
    usageAbout:
      "Tokens and answers of all conversations that are kept, deleted ones too until they are removed for good. Tokens of a prompt that were in the KV cache already were not read again, and do not count.",
    usageColumns: ["Model", "Answers", "Tokens read", "Tokens generated"],
    usageNone: "There are no answers yet.",
    usageNumber: digits,
    usageTotal: "Total",
    version: (version) => `edge-run ${version}. Conversations, models and settings stay on this machine.`,
    writing: "Writing",
  },
  shortcuts: {
    groups: [
      [
        "Everywhere",
        [
          ["Ctrl+K", "Search conversations and actions"],
          ["Ctrl+Shift+O", "New chat"],
          ["Ctrl+Shift+S", "Settings of this conversation"],
          ["Ctrl+,", "Settings of the app"],
          ["Ctrl+Z", "Undo what the latest notice says"],
          ["/", "Write a message"],
          ["?", "This list"],
          ["Esc", "Stop the answer; close what is open"],
        ],
      ],
      [
        "Messages",
        [
          ["Alt+↑ Alt+↓", "Go to the message before or after"],
          ["← →", "On a message: show the branch before or after"],
          ["E", "On a message: edit"],
          ["R", "On an answer: regenerate"],
          ["C", "On a message: copy"],
          ["T", "On an answer: look inside, token by token"],
          ["Delete", "On a message: delete, with what follows"],
          ["↑", "In an empty composer: go to your last message"],
        ],
      ],
      [
        "List of conversations",
        [
          ["↑ ↓", "Go through the list"],
          ["Enter", "Open"],
          ["F2", "Rename"],
          ["Delete", "Delete"],
        ],
      ],
    ],
    title: "Keyboard",
  },
  sidebar: {
    actions: (title) => `Actions for ${title}`,
    back: "Back to the conversations",
    conversations: "Conversations",
    delete: "Delete",
    deleted: "Deleted",
    deletedOn: (time, days) =>
      `${new Date(time * 1000).toLocaleDateString("en", { day: "numeric", month: "short" })}, ` +
      (days > 0 ? `${count(days, "day", "days")} left` : "removed at the next start"),
    empty: "Conversations appear here.",
    exportJson: "Export as JSON",
    exportMarkdown: "Export as Markdown",
    hide: "Hide the sidebar",
    label: "Sidebar",
    models: "Models",
    month: "Previous 30 days",
    move: "Move to folder …",
    moveLabel: "Folder (empty for none)",
    moveSave: "Move",
    moveTitle: "Move to folder",
    newChat: "New chat",
    nothingDeleted: "Nothing has been deleted.",
    older: "Older",
    pages: "Pages",
    pin: "Pin",
    pinned: "Pinned",
    rename: "Rename …",
    renameTitle: "Rename",
    restore: "Restore",
    search: "Search (Ctrl+K)",
    settings: "Settings",
    shortcuts: "Keyboard",
    show: "Show the sidebar",
    today: "Today",
    unpin: "Unpin",
    untitled: "Untitled",
    week: "Previous 7 days",
    writing: "is being answered",
    yesterday: "Yesterday",
  },
  tools: {
    add: "Add a server …",
    again: "Start again",
    allowed: "called without asking",
    arguments: "Arguments",
    argumentsAbout: "One a line, as they are: no quotes are needed.",
    askAgain: "Ask again",
    askAgainLabel: (name) => `Ask again before ${name} is called`,
    choiceAbout: "The model is told of the tools that are chosen here. You are asked before each call.",
    command: "Command or URL",
    commandAbout: "A program, or the address of a server that runs already, such as http://127.0.0.1:8000/mcp.",
    edit: "Edit",
    editLabel: (name) => `Edit ${name}`,
    editTitle: (name) => `Server ${name}`,
    environment: "Environment",
    environmentAbout: "NAME=value, one a line. Kept in a file that only you can read.",
    gone: "not there now",
    headers: "Headers",
    ignored: (names) => `Not taken over: ${names.join(", ")}.`,
    name: "Name",
    nameAbout: "Letters, digits, - and _.",
    noServers: "There are no tools. Add an MCP server first.",
    notVariables: "Every line must be NAME=value.",
    paste: "Paste a configuration …",
    pasteAbout: "The JSON for Claude Desktop, Cursor or VS Code that the page of a server shows.",
    pasteAdd: (number) => (number > 0 ? `Add and start ${count(number, "server", "servers")}` : "Add and start"),
    pasteFound: "Servers in it",
    pasteLabel: "Configuration",
    pasteStopped: "It will be added turned off.",
    replaces: "It takes the place of your server of this name.",
    offers: (names) => `Tools: ${names.join(", ")}`,
    remove: "Remove",
    removeLabel: (name) => `Remove ${name}`,
    save: "Save and start",
    servers: "Tools",
    serversAbout:
      "MCP servers have tools that a model can call. They are programs on this machine, or reached at a URL that you enter. Choose the tools of a conversation in its settings.",
    states: { off: "off", starting: "starting …", running: "running", failed: "failed" },
    title: "Tools",
    toSettings: "Servers",
    toggleLabel: (server) => `Turn ${server.name} ${server.enabled ? "off" : "on"}`,
    trust:
      "A program runs with your rights, and can do what you can; a server at a URL gets what the model sends it. Add only those that you trust.",
    turnOff: "Turn off",
    turnOn: "Turn on",
  },
  tokens: {
    acceptedFrom: (drafter) => `accepted from ${drafter}`,
    alternative: (text, percent, note) => `Branch here with “${text}”, ${percent}${note && `, ${note}`}`,
    alternatives: "Choose another token to branch here:",
    branch: (text) => `Branch here with “${text}”`,
    chosen: "chosen by you",
    colourBy: "Colour by",
    corrected: "corrected by the model",
    current: (text, percent) => `“${text}”, ${percent}, written`,
    details: (text) => `Token “${text}”`,
    drafters: {
      suffix: "suffix look-up",
      edit: "the text that is being rewritten",
      history: "look-up in earlier conversations",
      ngram: "the n-gram table",
      recycle: "recycled candidates",
      model: "the draft model",
      jacobi: "the pass before",
      other: "another drafter",
    },
    ids: (ids) => `${ids.length > 1 ? "ids" : "id"} ${ids.join(", ")}`,
    inPass: (pass) => `pass ${pass} over its block`,
    keys: "Arrow keys go from token to token, Enter goes to the alternatives, Esc closes.",
    label: (text, percent, origin) => `“${text}”, ${percent}. ${origin}`,
    legend: "Meaning of the colours",
    levels: ["90 % and more", "from 70 %", "from 50 %", "from 30 %", "from 10 %", "below 10 %"],
    list: "Tokens of the answer",
    modes: { probability: "probability", origin: "origin" },
    none: "No details of the tokens were kept for this answer. The settings say whether they are kept.",
    origin: {
      prefill: () => "The first token, from the pass that read the prompt.",
      decoded: () => "Decoded by the model in a pass of its own, without a draft.",
      accepted: (drafter) => `Drafted by ${drafter} and accepted.`,
      corrected: (drafter, rejected) => `The draft said “${rejected}” (from ${drafter}); the model corrected it.`,
      bonus: () => "The model's own token behind an accepted draft, from the same pass.",
      filled: (_, __, pass) => `Found in pass ${pass} over its block.`,
      chosen: (_, rejected) => `Chosen by you in place of “${rejected}”.`,
    },
    own: "the model's own",
    parts: (number) => `${number} tokens make up these characters; their probabilities are multiplied.`,
    percent,
    show: "Look inside: tokens and probabilities",
    special: "control token",
    specialToken: (text) => `control token ${text}`,
    summary: ({ tokens, accepted, passes, mean, filled }) =>
      [
        count(tokens, "token", "tokens"),
        filled.size
          ? `in blocks, of which ${percent((filled.get(1) ?? 0) / tokens)} found in the first pass`
          : accepted
          ? `${digits(accepted)} accepted from drafts (${percent(accepted / tokens)}): ${count(passes, "pass", "passes")} instead of ${digits(passes + accepted)}`
          : `none from drafts: ${count(passes, "pass", "passes")}`,
        `mean probability ${percent(mean)}`,
      ].join(" · "),
    title: "Tokens of this answer",
    unknown: "No details were kept for this part.",
    written: "written",
  },
  welcome: {
    about: "Everything stays on this machine: what you write, what the model answers, and your files.",
    aboutShell: "The model that comes along writes shell commands and does not chat; everything stays on this machine.",
    chatExamples: [
      "Explain what a hash table is, with a small example",
      "Write a polite reminder for an unpaid invoice",
      "What should I ask before renting a flat?",
    ],
    examples: "Examples",
    getModel: "Get a chat model",
    greeting: "What can I help you with?",
    greetingShell: "Describe what the shell should do",
    shellExamples: [
      "find files larger than 100 MB",
      "list the 10 biggest files",
      "count the lines in all Python files",
      "which process uses port 8080",
    ],
  },
};
