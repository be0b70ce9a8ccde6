// Drawings on canvases, in the colours of the style sheet.

// The value of a colour of the style sheet: canvases do not know light-dark() and variables themselves.
function colours(canvas) {
  const style = getComputedStyle(canvas);
  return (name) => {
    canvas.style.color = `var(--${name})`;
    return style.color;
  };
}

// A canvas' context in CSS pixels, cleared; null while it is hidden.
function surface(canvas, height = canvas.clientHeight) {
  const width = canvas.clientWidth;
  if (!width || !height) return null;
  const ratio = window.devicePixelRatio || 1;
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// Values [n], the newest last, over the width that `most` of them take.
export function sparkline(canvas, values, most) {
  const on = surface(canvas);
  if (!on || values.length < 2) return;
  const { context, width, height } = on;
  const colour = colours(canvas);
  const top = Math.max(...values, 1e-9);
  const place = (index) => [
    width - ((values.length - 1 - index) * width) / (most - 1),
    height - 2 - (values[index] / top) * (height - 4),
  ];
  context.beginPath();
  values.forEach((_, index) => context.lineTo(...place(index)));
  context.strokeStyle = colour("dense");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(place(0)[0], height);
  context.globalAlpha = 0.14;
  context.fillStyle = colour("dense");
  context.fill();
  context.globalAlpha = 1;
}

const KINDS = ["experts", "dense", "other"];

// Steps beside each other, a lane a row. Their widths are their times. `empty`: what an idle lane says.
export function lanes(canvas, names, steps, empty) {
  const on = surface(canvas);
  if (!on) return;
  const { context, width, height } = on;
  const colour = colours(canvas);
  const left = 40;
  const bottom = 18;
  const gap = 3;
  const row = (height - bottom) / names.length;
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  names.forEach((name, lane) => {
    context.fillStyle = colour("soft");
    context.textAlign = "left";
    context.fillText({ gpu: "GPU", pcie: "PCIe", cpu: "CPU" }[name] ?? name, 0, row * (lane + 0.5));
    if (empty[name]) context.fillText(empty[name], left, row * (lane + 0.5));
    context.fillStyle = colour("hair");
    context.fillRect(left, row * (lane + 1) - 1, width - left, 1);
  });
  const total = steps.reduce((sum, step) => sum + step.us, 0);
  if (!total) return;
  const scale = (width - left - gap * (steps.length - 1)) / total;
  let x = left;
  for (const step of steps) {
    for (const [lane, kind, , start, length] of step.spans) {
      context.fillStyle = colour(KINDS[kind]);
      context.fillRect(x + start * scale, row * lane + 4, Math.max(length * scale, 0.6), row - 9);
    }
    context.fillStyle = colour("soft");
    context.textAlign = "center";
    const label = `${(step.us / 1000).toFixed(1)} ms${step.tokens > 1 ? `, ${step.tokens} tokens` : ""}`;
    if (context.measureText(label).width < step.us * scale) {
      context.fillText(label, x + (step.us * scale) / 2, height - bottom / 2 + 1);
    }
    x += step.us * scale + gap;
  }
}

// Rows of {layer, use}; use 1000 is an even share. `cell`: [row, column] to outline, or null.
export function heat(canvas, rows, cell) {
  if (!rows.length) return;
  const columns = Math.max(...rows.map((row) => row.use.length));
  const tall = Math.max(3, Math.min(14, Math.floor(420 / rows.length)));
  canvas.style.height = `${tall * rows.length}px`;
  const on = surface(canvas, tall * rows.length);
  if (!on) return;
  const { context, width } = on;
  const colour = colours(canvas);
  const steps = [colour("heat-none"), colour("heat-even"), colour("heat-most")];
  const wide = width / columns;
  const gap = wide > 5 && tall > 5 ? 1 : 0;
  rows.forEach((row, y) => {
    row.use.forEach((use, x) => {
      context.fillStyle = shade(steps, use / 1000);
      context.fillRect(x * wide, y * tall, wide - gap, tall - gap);
    });
  });
  if (cell) {
    context.strokeStyle = colour("ink");
    context.lineWidth = 2;
    context.strokeRect(cell[1] * wide, cell[0] * tall, wide - gap, tall - gap);
  }
}

// From no use over an even share to four times as much, which is as far as the scale goes.
function shade([none, even, most], share) {
  const [from, to, part] = share <= 1 ? [none, even, share] : [even, most, Math.min((share - 1) / 3, 1)];
  return `color-mix(in oklab, ${to} ${(part * 100).toFixed(1)}%, ${from})`;
}

// The cell under a pointer, or null.
export function cellAt(canvas, rows, event) {
  const box = canvas.getBoundingClientRect();
  const y = Math.floor(((event.clientY - box.top) / box.height) * rows.length);
  const row = rows[y];
  if (!row) return null;
  const columns = Math.max(...rows.map((each) => each.use.length));
  const x = Math.floor(((event.clientX - box.left) / box.width) * columns);
  return x >= 0 && x < row.use.length ? [y, x] : null;
}
