// What a reload must not lose: kept in this browser tab alone, until it is closed. The server keeps nothing.

/** Keep `value` under `name`, or nothing for null. Return whether there was room. */
export function keep(name, value) {
  try {
    if (value === null) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch { // full, or forbidden by the browser
    return false;
  }
}

/** Return what was kept under `name`; null for nothing, or nothing that can be read. */
export function kept(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;
  }
}
