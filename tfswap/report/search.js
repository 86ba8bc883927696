"use strict";
// A page's search field: `changed` runs after each change; "/" goes to the field, and Escape clears it.
function searching(find, changed) {
  find.addEventListener("input", changed);
  find.addEventListener("keydown", event => { if (event.key === "Escape") { find.value = ""; changed(); } });
  addEventListener("keydown", event => {
    if (event.key !== "/" || event.target === find) return;
    event.preventDefault();
    find.focus();
  });
}
