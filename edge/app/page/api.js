/** Requests to the app's server: one function each. */

/** An error that the server has answered with, or that kept the request from reaching it. */
export class ApiError extends Error {
  /**
   * @param {string} message one line for people
   * @param {string} code what programs tell errors by; "unreachable" where no server answered
   * @param {number} status HTTP status, 0 where no server answered
   */
  constructor(message, code, status = 0) {
    super(message);
    this.name = "ApiError";
    this.code = code;
    this.status = status;
  }
}

/** What is shown where no server answers; replaced by the page with a sentence of strings.js. */
export const messages = { unreachable: "unreachable", unreadable: "unreadable" };

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, error.code ?? "error", response.status);
  } catch {
    return new ApiError(`${response.status} ${response.statusText}`, "error", response.status);
  }
}

/**
 * Sends a request and returns the answer's object.
 *
 * @param {string} method
 * @param {string} path below the origin, such as "/api/state"
 * @param {object} [body] sent as JSON
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function request(method, path, body, signal) {
  const options = { method, signal, credentials: "same-origin", cache: "no-store", headers: { accept: "application/json" } };
  if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(messages.unreachable, "unreachable");
  }
  if (!response.ok) throw await errorOf(response);
  if (response.status === 204) return {};
  try {
    return await response.json();
  } catch {
    throw new ApiError(messages.unreadable, "unreadable", response.status);
  }
}

const at = (id) => encodeURIComponent(id);

/** Fetches what is at a path. Responses may overtake each other: an outdated one is replaced by the one that did. */
function latestOf(path) {
  let sent = 0;
  let received = 0;
  let latest;
  return async () => {
    sent += 1;
    const number = sent;
    const got = await request("GET", path);
    if (number > received) {
      received = number;
      latest = got;
    }
    return latest;
  };
}

export const getState = latestOf("/api/state");
export const getUsage = () => request("GET", "/api/usage");
export const getLogin = () => request("GET", "/api/login");
export const changeLogin = (enabled) => request("PUT", "/api/login", { enabled });
export const changeSettings = (changes) => request("PATCH", "/api/settings", changes);

export const getConversations = latestOf("/api/conversations?deleted=0");
export const getDeletedConversations = latestOf("/api/conversations?deleted=1");
export const createConversation = (fields) => request("POST", "/api/conversations", fields);
export const getConversation = (id) => request("GET", `/api/conversations/${at(id)}`);
export const changeConversation = (id, changes) => request("PATCH", `/api/conversations/${at(id)}`, changes);
export const deleteConversation = (id) => request("DELETE", `/api/conversations/${at(id)}`);
export const restoreConversation = (id) => request("POST", `/api/conversations/${at(id)}/restore`, {});

export const sendMessage = (conversation, message) =>
  request("POST", `/api/conversations/${at(conversation)}/messages`, message);
export const editMessage = (id, content, branch) => request("POST", `/api/messages/${at(id)}/edit`, { content, branch });
export const regenerateMessage = (id, count, model) =>
  request("POST", `/api/messages/${at(id)}/regenerate`, { count, model });
export const continueMessage = (id) => request("POST", `/api/messages/${at(id)}/continue`, {});
export const stopMessage = (id) => request("POST", `/api/messages/${at(id)}/stop`, {});
export const decideCall = (id, call, decision) => request("POST", `/api/messages/${at(id)}/calls/${at(call)}`, { decision });
export const branchAtToken = (id, index, alternative) =>
  request("POST", `/api/messages/${at(id)}/branch`, { index, alternative });
export const deleteMessage = (id) => request("DELETE", `/api/messages/${at(id)}`);
export const restoreMessage = (id) => request("POST", `/api/messages/${at(id)}/restore`, {});
export const getTokens = (id) => request("GET", `/api/messages/${at(id)}/tokens`);

export const measureContext = (conversation, content, attachments, signal) =>
  request("POST", `/api/conversations/${at(conversation)}/context`, { content, attachments }, signal);
export const countTokens = (model, text, signal) => request("POST", "/api/tokens", { model, text }, signal);

export const keepImage = (name, url) => request("POST", "/api/image", { name, url });

export const search = (query, signal) => request("GET", `/api/search?q=${encodeURIComponent(query)}`, undefined, signal);
export const importConversations = (name, content) => request("POST", "/api/import", { name, content });
export const savePreset = (name, preset) => request("PUT", `/api/presets/${at(name)}`, preset);
export const deletePreset = (name) => request("DELETE", `/api/presets/${at(name)}`);

export const getTools = latestOf("/api/tools");
export const readToolServers = (text, signal) => request("POST", "/api/tools/configuration", { text }, signal);
export const saveToolServer = (name, server) => request("PUT", `/api/tools/${at(name)}`, server);
export const removeToolServer = (name) => request("DELETE", `/api/tools/${at(name)}`);

/** Addresses that the browser downloads from. */
export const exportUrl = (id, format) => `/api/conversations/${at(id)}/export?format=${format}`;
export const EXPORT_ALL_URL = "/api/export";
export const EVENTS_URL = "/api/events";
