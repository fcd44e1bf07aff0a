// Images for the next message: dropped, pasted or chosen, and shrunk where they are larger than a model reads.

import { element } from "./dom.js";

const LONGEST = 2048; // pixels of the longer side
const MOST = 1 << 20; // bytes that are sent as they are

/** Return a file's image as a data: URL. */
export async function dataUrl(file) {
  const bitmap = await createImageBitmap(file).catch(() => { throw new Error(`${file.name}: this browser reads no image in it.`); });
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MOST && ["image/png", "image/jpeg"].includes(file.type)) return asIs(file);
  const [width, height] = [bitmap.width, bitmap.height].map((each) => Math.max(1, Math.round(each * scale)));
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function asIs(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** The images that a transfer, pasted or dropped, holds. */
export const imagesIn = (transfer) => [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));

/** Return the thumbnails of images, each with a button that calls `remove(i)`, if that is given. */
export function thumbnails(urls, remove) {
  return element("div", { className: "images" }, ...urls.map((src, i) => {
    const shown = element("div", {}, element("img", { src, alt: `Image ${i + 1}` }));
    if (remove) {
      const button = element("button", { type: "button", ariaLabel: `Remove image ${i + 1}` }, "Remove");
      button.addEventListener("click", () => remove(i));
      shown.append(button);
    }
    return shown;
  }));
}
