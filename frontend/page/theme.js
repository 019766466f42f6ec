// Runs before anything is drawn, so that no page flashes in the other theme. "auto" follows the system.
"use strict";
try {
  const kept = localStorage.getItem("quire.theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
} catch {
  // A browser that keeps nothing follows the system.
}
