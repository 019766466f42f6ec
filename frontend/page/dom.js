// Making nodes. Text becomes text nodes and never HTML, whoever wrote it.

/** An element: properties (`class`, `dataset`, `on...` listeners, `aria-...` and other attributes), then children. Many go
 * in an array: arguments have a limit. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "open") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const each of children.flat()) if (each !== null && each !== undefined && each !== false) node.append(each);
  return node;
}

/** A value kept in this browser; `otherwise` where there is none, or it cannot be read. */
export function kept(name, otherwise) {
  try {
    const text = localStorage.getItem("quire." + name);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

/** Keep a value in this browser; false where it keeps none (it is full, or told not to). */
export function keep(name, value) {
  try {
    localStorage.setItem("quire." + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
