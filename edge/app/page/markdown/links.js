/** Links and images of answers: which addresses may be opened, and how they are shown. */

import { h } from "edgerun/preact";
import { strings } from "../strings.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
/** Text that a reader would take for an address: a host name with an ending. */
const LOOKS_LIKE_HOST = /(?:^|[\s(/@])((?:[\p{L}\p{N}-]+\.)+\p{L}{2,})(?=$|[\s/:?#),])/iu;

/**
 * Reads an address that may be opened.
 *
 * @param {string} address
 * @returns {URL|null} null for a relative address, or one of another scheme than http, https and mailto
 */
export function openableAddress(address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  return SCHEMES.has(url.protocol) ? url : null;
}

/**
 * The host that has to be shown beside a link, because its text names another or hides what the address is.
 *
 * @param {URL} url
 * @param {string} text what the link shows
 * @returns {string|null}
 */
export function hostToShow(url, text) {
  const host = url.protocol === "mailto:" ? url.pathname : url.host;
  if (url.username || url.password || host.includes("xn--")) return host;
  const named = LOOKS_LIKE_HOST.exec(text);
  const bare = (name) => name.toLowerCase().replace(/^www\./, "");
  if (!named) return null;
  if (url.protocol === "mailto:") return host.toLowerCase().includes(named[1].toLowerCase()) ? null : host;
  return bare(named[1]) === bare(url.hostname) ? null : host;
}

/**
 * A link; its text alone, with the address, where the address may not be opened.
 *
 * @param {{address: string, text: string, children: any}} props
 */
export function Link({ address, text, children }) {
  const url = openableAddress(address);
  const label = h("bdi", null, children);
  if (!url) return h("span", null, label, text === address ? null : [" (", h("bdi", null, address.slice(0, 500)), ")"]);
  const host = hostToShow(url, text);
  const link = h(
    "a",
    { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href.slice(0, 500) },
    label,
  );
  return host ? h("span", null, link, " (", h("bdi", { class: "md-host" }, host), ")") : link;
}

/**
 * An image that the answer holds itself; one of another host is not loaded, and shown as a link.
 *
 * @param {{address: string, description: string, images: Array<string>}} props images: those that "data:N" stands for
 */
export function Image({ address, description, images }) {
  const held = /^data:(\d+)$/.exec(address);
  if (held && images[held[1]]) return h("img", { src: images[held[1]], alt: description, loading: "lazy" });
  const shown = address.startsWith("data:") ? "data:" : address;
  return h(
    "span",
    { class: "md-image" },
    description ? [h("bdi", null, description), " "] : null,
    h(Link, { address: shown, text: shown }, shown.slice(0, 500)),
    ` (${strings.markdown.imageNotLoaded})`,
  );
}
